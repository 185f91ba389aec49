"""The page's own style sheet and its one script: tooltips. Nothing is loaded from anywhere."""

from __future__ import annotations

COLOURS = {
    "paper": ("#fbfaf7", "#14171b"),
    "card": ("#ffffff", "#1b1f25"),
    "ink": ("#1d2228", "#e6e8ea"),
    "soft": ("#5d6773", "#a0a9b3"),
    "faint": ("#9aa3ad", "#6f7983"),
    "rule": ("#e4e2dc", "#2c323a"),
    "grid": ("#eeece6", "#252a31"),
    "accent": ("#0f6e63", "#5cc5b5"),
    "train": ("#8fb9b3", "#3f6f69"),
    "evaluation": ("#c2410c", "#fb923c"),
    "ghost": ("#b9a8a0", "#6b5f5a"),
    "change": ("#5f7fa8", "#86a6cf"),
    "bad": ("#c0392b", "#f0776a"),
    "bad-wash": ("#fbe9e6", "#3a2422"),
    "baseline": ("#7a6f9b", "#a99bd1"),
    "productive": ("#2a9d78", "#35b58c"),
    "communication": ("#4f7fb5", "#6b9bd1"),
    "data_wait": ("#a679b8", "#b98acb"),
    "checkpoint": ("#dba63a", "#e2b450"),
    "evaluation-time": ("#64b3bd", "#6fc0ca"),
    "startup": ("#93a1b0", "#74818f"),
    "recovery": ("#d1495b", "#e0606f"),
    "rework": ("#ee8959", "#f0955f"),
    "stopped": ("#dcdfe3", "#343b44"),
    "other": ("#b9b3a6", "#8b857a"),
}
"""Name of a colour -> in the light theme, in the dark one."""

_STYLE_RULES = """
*{box-sizing:border-box}
html{color-scheme:light dark;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
 font:15px/1.55 ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
 "Liberation Sans",Arial,sans-serif;
 font-variant-numeric:tabular-nums}
main{max-width:1040px;margin:0 auto;padding:48px 28px 80px}
header{margin-bottom:30px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.02em;margin:0 0 6px;font-weight:650}
h2{font-size:17px;letter-spacing:-.01em;margin:46px 0 4px;font-weight:650}
p.note{color:var(--soft);margin:0 0 14px;max-width:72ch}
p.lead{color:var(--soft);margin:0;font-size:16px}
.state{display:inline-block;border-radius:999px;padding:1px 11px;font-size:13px;font-weight:600;
 vertical-align:4px;margin-left:10px;border:1px solid currentColor;color:var(--accent)}
.state.failed,.state.lost{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(3,1fr);gap:1px;
 background:var(--rule);border:1px solid var(--rule);border-radius:10px;overflow:hidden}
.tile{background:var(--card);padding:15px 18px 13px}
.tile b{display:block;font-size:24px;line-height:1.2;font-weight:620;letter-spacing:-.02em}
.tile b small{font-size:14px;font-weight:500;color:var(--soft);letter-spacing:0}
.tile span{color:var(--soft);font-size:13px}
.tile i{display:block;font-style:normal;color:var(--faint);font-size:12.5px;line-height:1.35;
 margin-top:3px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:10px;
 padding:14px 14px 8px;position:relative}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:12px;font-family:inherit}
svg .label{fill:var(--ink);font-weight:600}
.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--grid)}.axis{stroke:var(--rule)}
.train{fill:none;stroke:var(--train);stroke-width:1}
.smooth{fill:none;stroke:var(--accent);stroke-width:2;stroke-linejoin:round}
.evaluation{fill:none;stroke:var(--evaluation);stroke-width:1.8;stroke-linejoin:round}
.dot{fill:var(--card);stroke:var(--evaluation);stroke-width:2}
.ghost{fill:none;stroke:var(--ghost);stroke-width:1.6;stroke-dasharray:2 3}
.baseline{stroke:var(--baseline);stroke-dasharray:6 4;stroke-width:1.2}
svg text.baseline-label{fill:var(--baseline);stroke:var(--card);stroke-width:4px;paint-order:stroke;
 stroke-dasharray:none}
.incident{stroke:var(--bad);stroke-width:1;stroke-dasharray:1 3;opacity:.8}
.change{stroke:var(--change);stroke-width:1;stroke-dasharray:1 3;opacity:.8}
.thin{fill:none;stroke:var(--accent);stroke-width:1.3;stroke-linejoin:round}
.point{fill:var(--accent)}
.wash{fill:var(--bad);opacity:.13}
.span{fill:var(--bad)}
.span.change{fill:var(--change);stroke:none;opacity:1}
.lane{fill:var(--accent);opacity:.85}
.lane.alt{opacity:.55}
svg text.on-lane{fill:#fff;font-size:11.5px;font-weight:600}
.tick{stroke:var(--checkpoint);stroke-width:2}
.tick.eval{stroke:var(--evaluation-time)}
.tick.bad{stroke:var(--bad)}
.tick.change{stroke:var(--change);stroke-dasharray:none;opacity:1}

figure.narrow{display:none}
.small{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:14px}
.heat td{background:color-mix(in srgb,var(--accent) var(--heat,0%),transparent);min-width:6px;
 height:18px;padding:0 1px}
.heat th{text-align:left;padding-right:6px}
figcaption{color:var(--soft);font-size:13px;padding:0 0 4px}
.break{stroke:var(--faint);stroke-width:1;stroke-dasharray:3 3}
.cross{stroke:var(--faint);stroke-width:1;visibility:hidden;pointer-events:none}
.spot{fill:var(--ink);visibility:hidden;pointer-events:none}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--paper);
 border-radius:7px;padding:7px 10px;font-size:12.5px;line-height:1.45;white-space:pre;opacity:0;
 transition:opacity .08s;box-shadow:0 4px 18px #0003}
.keys{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--soft);font-size:12.5px;
 padding:4px 4px 6px}
.keys span::before{content:"";display:inline-block;width:18px;height:0;margin-right:7px;
 vertical-align:4px;border-top:2px solid var(--key);border-top-style:var(--stroke,solid)}
.bar{display:flex;height:34px;border-radius:7px;overflow:hidden;margin:4px 0 12px;gap:1px}
.bar div{min-width:2px}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:500;color:var(--soft);text-align:left;font-size:12.5px;
 border-bottom:1px solid var(--rule)}
td,th{padding:6px 14px 6px 0;vertical-align:top}
tr+tr td{border-top:1px solid var(--grid)}
td.n,th.n{text-align:right;white-space:nowrap}
td.soft,.soft{color:var(--soft)}
td .swatch{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:9px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 18px}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;
 font-size:13px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;line-height:1.5}
h1,p,td,code,.tile b,.tile i{overflow-wrap:anywhere}
.sample+.sample{margin-top:12px}
details summary{cursor:pointer;color:var(--soft);padding:8px 0}
tr.given td{font-weight:600}
tr.given td .soft{font-weight:400;color:var(--accent)}
footer{margin-top:56px;color:var(--faint);font-size:12.5px;border-top:1px solid var(--rule);
 padding-top:14px}
@media (max-width:700px){figure.wide{display:none}figure.narrow{display:block}
.tiles{grid-template-columns:repeat(2,1fr)}
main{padding:26px 14px 50px}h1{font-size:24px}.tile b{font-size:20px}
table,tbody{display:block}thead{display:none}
tr{display:grid;grid-template-columns:1fr 1fr;column-gap:20px;padding:7px 0}
tr+tr{border-top:1px solid var(--rule)}
td,td.n,tr+tr td{display:flex;justify-content:space-between;gap:12px;padding:2px 0;border:0;
 grid-column:1/-1;text-align:right;white-space:normal}
td.n{grid-column:auto}td.none,td.n.none{display:none}
td::before{content:attr(data-label);color:var(--soft);text-align:left;flex:none;max-width:66%}
td[data-label=""]{justify-content:flex-start;gap:0;font-weight:600}}
@media print{body{background:#fff}figure,.tile,.card{break-inside:avoid}}
"""

SCRIPT = """
const tip=document.getElementById('tip');
function show(e,text){tip.textContent=text;tip.style.opacity=1;
 const r=tip.getBoundingClientRect();
 const left=e.clientX+16+r.width>innerWidth?e.clientX-16-r.width:e.clientX+16;
 tip.style.left=Math.max(4,left)+'px';
 tip.style.top=Math.max(4,Math.min(innerHeight-r.height-4,e.clientY-r.height/2))+'px';}
function hide(){tip.style.opacity=0}
for(const el of document.querySelectorAll('[data-tip]')){
 el.addEventListener('mousemove',e=>{show(e,el.dataset.tip);e.stopPropagation()});
 el.addEventListener('mouseleave',hide);}
for(const data of document.querySelectorAll('script.points')){
 const points=JSON.parse(data.textContent),svg=data.parentElement.querySelector('svg');
 const cross=svg.querySelector('.cross'),spot=svg.querySelector('.spot');
 if(!points.length)continue;
 svg.addEventListener('mousemove',e=>{
  const box=svg.getBoundingClientRect(),x=(e.clientX-box.left)*svg.viewBox.baseVal.width/box.width;
  let low=0,high=points.length-1;
  while(low<high){const mid=(low+high)>>1;points[mid][0]<x?low=mid+1:high=mid}
  if(low>0&&x-points[low-1][0]<points[low][0]-x)low--;
  const p=points[low];
  cross.setAttribute('x1',p[0]);cross.setAttribute('x2',p[0]);cross.style.visibility='visible';
  spot.setAttribute('cx',p[0]);spot.setAttribute('cy',p[1]);spot.style.visibility='visible';
  show(e,p[2]);});
 svg.addEventListener('mouseleave',()=>{hide();
  cross.style.visibility=spot.style.visibility='hidden'});}
"""


def style_sheet() -> str:
    """Both themes: the reader's system chooses."""
    light, dark = (
        ";".join(f"--{name.replace('_', '-')}:{both[theme]}" for name, both in COLOURS.items())
        for theme in (0, 1)
    )
    themes = f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return themes + _STYLE_RULES


def class_colour(name: str) -> str:
    """CSS colour of a class of time."""
    return f"var(--{'evaluation-time' if name == 'evaluation' else name.replace('_', '-')})"
