'use strict';
// One page: a table of runs, or one run. The server sends what changed; `run` holds the sum of it.
const $ = id => document.getElementById(id);
const BAD = ['failed', 'interrupted', 'recovering', 'unreadable', 'waiting for a majority'];
const COLOURS = {evaluation: 'evaluation-time'};
let stream = null, run = {}, curve = [], ghosts = [], lossChart = null, memberChart = null;

// --- words ---------------------------------------------------------------------------------
const count = value => Math.round(value).toLocaleString('en-US');
const si = value => {
  for (const [size, prefix] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']])
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + ' ' + prefix;
  return String(Number(value.toPrecision(3)));
};
const duration = s => {
  if (s === null || s === undefined) return '–';
  if (s === 0) return '0 s';
  if (s < 1) return Math.round(s * 1e3) + ' ms';
  if (s < 9.95) return s.toFixed(1) + ' s';
  const all = Math.round(s), pair = (a, x, b, y) => b ? `${a} ${x} ${b} ${y}` : `${a} ${x}`;
  if (all >= 86400) return pair(Math.floor(all / 86400), 'd', Math.floor(all % 86400 / 3600), 'h');
  if (all >= 3600) return pair(Math.floor(all / 3600), 'h', Math.floor(all % 3600 / 60), 'min');
  if (all >= 60) return pair(Math.floor(all / 60), 'min', all % 60, 's');
  return all + ' s';
};
const percent = ratio => (100 * ratio).toFixed(1) + ' %';
const plural = (n, word) => count(n) + ' ' + word + (n === 1 ? '' : 's');
const dollars = usd => '$' + usd.toLocaleString('en-US', {minimumFractionDigits: 2, maximumFractionDigits: 2});
const lossText = loss => loss === null ? '–' : loss.toFixed(4);

// --- the page's elements -------------------------------------------------------------------
function make(tag, text, classes) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (classes) found.className = classes;
  return found;
}
function rows(table, lines) {
  // A line is a list of [text or element, class]. Labels of narrow pages come from the head.
  const heads = [...table.querySelectorAll('th')].map(each => each.textContent);
  const body = table.tBodies[0], made = [];
  for (const line of lines) {
    const row = make('tr');
    line.forEach(([content, classes], index) => {
      const cell = make('td', undefined, classes);
      cell.dataset.label = index ? heads[index] ?? '' : '';
      cell.append(content);
      row.append(cell);
    });
    made.push(row);
  }
  body.replaceChildren(...made);
}
function tile(value, label, more) {
  const found = make('div', undefined, 'tile');
  found.append(make('b', value), make('span', label));
  if (more) found.append(make('i', more));
  return found;
}
function setState(text) {
  $('state').textContent = text;
  $('state').classList.toggle('bad', BAD.includes(text));
}
function setProblem(text) {
  $('problem').textContent = text || '';
  $('problem').hidden = !text;
}
const colour = name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

// --- one run -------------------------------------------------------------------------------
function showRun(news) {
  const {curve: points, ...state} = news;
  Object.assign(run, state);
  if (points.reset) { curve = []; ghosts = points.ghosts; }
  curve.push(...points.points);
  document.title = `${run.name}: ${run.state}`;
  $('title').textContent = run.run;
  setState(run.state);
  setProblem(run.problem);
  const parts = [run.place, `generation ${run.generation}`, plural(run.workers, 'worker')];
  $('lead').textContent = parts.join(' · ');
  showTiles();
  if (points.reset || points.points.length || 'marks' in state || 'validations' in state) drawLoss();
  if ('marks' in state || points.points.length || !memberChart) drawMembers();
  if ('node_list' in state) showNodes();
  if ('classes' in state) showClasses();
  if ('incident_list' in state) showIncidents();
  if ('lines' in state)
    rows($('lines'), run.lines.map(([at, text, mood]) => [[duration(at), 'soft n'], [text, mood === 'bad' ? 'bad' : '']]));
}
function showTiles() {
  const left = run.eta_s === null ? '' : duration(run.eta_s) + ' left';
  const again = run.tokens_again ? si(run.tokens_again) + ' more done again' : '';
  const number = hours => Number(hours.toPrecision(3)), unpriced = run.usd !== null && run.unpriced_hours;
  const hours = number(run.node_hours) + ' node-hours' + (unpriced ? `, ${number(unpriced)} of them without a price` : '');
  const cost = run.usd === null ? [si(run.tokens) + ' ' + run.unit, 'cost', hours + '. No dollars: ' + run.price_missing]
    : [dollars(run.usd), 'cost', `${hours}, ${si(run.tokens)} ${run.unit}`];
  $('tiles').replaceChildren(
    tile(`${count(run.step)} / ${count(run.total_steps)}`, 'step', left),
    tile(lossText(run.loss), 'loss', run.validations.length ? 'validation ' + lossText(run.validations.at(-1)[1]) : ''),
    tile(`${si(run.tokens_per_second)} ${run.unit}/s`, 'speed', again),
    tile(percent(run.goodput), 'goodput', 'of ' + duration(run.running_s) + ' of running time'),
    tile(count(run.nodes), run.nodes === 1 ? 'node' : 'nodes', plural(run.workers, 'worker')),
    tile(count(run.incidents), run.incidents === 1 ? 'incident' : 'incidents', ''),
    tile(run.checkpoint === null ? 'none' : 'step ' + count(run.checkpoint), 'newest checkpoint', ''),
    tile(...cost));
}
function showClasses() {
  const named = run.classes.map(([name, seconds, about]) => [name, seconds, about, `var(--${COLOURS[name] ?? name})`]);
  const box = (name, seconds, colour) => {
    const found = make('div');
    found.style.flexGrow = seconds / run.fleet_s;
    found.style.background = colour;
    found.title = `${name}: ${duration(seconds)}`;
    return found;
  };
  $('bar').replaceChildren(...named.map(([name, seconds, , colour]) => box(name, seconds, colour)));
  rows($('classes'), named.map(([name, seconds, about, colour]) => {
    const title = make('span'), swatch = make('span', undefined, 'swatch');
    swatch.style.background = colour;
    title.append(swatch, name.replaceAll('_', ' '));
    return [[title, ''], [duration(seconds), 'n'], [percent(seconds / run.fleet_s), 'n'], [about, 'soft wide']];
  }));
}
function showIncidents() {
  $('incidents-note').textContent = run.incident_list.length
    ? 'The newest first. A change that was planned broke nothing.' : 'Nothing broke, and no node came or left.';
  rows($('incidents'), run.incident_list.map(each => [
    [duration(each.at_s), 'soft'], [each.title + (each.planned ? ' (planned)' : ''), each.planned ? '' : 'bad'],
    [count(each.step), 'n'], [duration(each.stood_still_s ?? each.seconds), 'n'], [plural(each.steps_lost, 'step'), 'n']]));
  $('incidents').hidden = !run.incident_list.length;
}
function showNodes() {
  const counts = {in: 0, spare: 0, lost: 0, out: 0};
  const grid = $('nodes'), boxes = grid.children;
  while (boxes.length > run.node_list.length) boxes[boxes.length - 1].remove();
  run.node_list.forEach(([name, state], index) => {
    const kind = state.split(':')[0], about = `${name}: ${state === 'in' ? 'takes part' : state}`;
    counts[kind] += 1;
    let box = boxes[index];
    if (!box) {
      box = make('span');
      box.setAttribute('role', 'option');
      box.setAttribute('aria-selected', 'false');
      grid.append(box);
    }
    if (box.title === about) return;
    box.className = kind;
    box.title = about;
    box.setAttribute('aria-label', about);
  });
  const takes = counts.in === 1 ? 'takes part' : 'take part';
  const words = Object.entries(counts).filter(each => each[1]).map(([kind, n]) => `${count(n)} ${kind === 'in' ? takes : kind}`);
  $('nodes-note').textContent = words.join(', ') || 'none yet';
}
function selectNode(index) {
  const boxes = $('nodes').children;
  if (!boxes.length) return;
  const chosen = Math.max(0, Math.min(boxes.length - 1, index));
  for (const box of $('nodes').querySelectorAll('[aria-selected=true]')) box.setAttribute('aria-selected', 'false');
  boxes[chosen].setAttribute('aria-selected', 'true');
  $('nodes').dataset.chosen = chosen;
  $('node-reading').textContent = boxes[chosen].title;
}
$('nodes').addEventListener('keydown', event => {
  const move = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1, Home: -1e9, End: 1e9}[event.key];
  if (move === undefined) return;
  event.preventDefault();
  selectNode(Number($('nodes').dataset.chosen ?? -1) + move);
});
$('nodes').addEventListener('mouseover', event => {
  const index = [...$('nodes').children].indexOf(event.target);
  if (index >= 0) selectNode(index);
});

// --- charts --------------------------------------------------------------------------------
const plain = {points: {show: false}};
function axes() {
  const each = {stroke: colour('soft'), grid: {stroke: colour('grid'), width: 1}, ticks: {stroke: colour('rule'), width: 1}, font: '12px sans-serif'};
  return [{...each, size: 32}, {...each, size: 56}];
}
function size(id) {
  return {width: Math.max(200, $(id).clientWidth), height: $(id).clientHeight};
}
function lossData() {
  // uPlot wants one rising list of steps: that of all lines. A value that a line lacks is undefined.
  const lines = [curve, run.validations ?? [], ...ghosts];
  const steps = [...new Set(lines.flatMap(line => line.map(point => point[0])))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  return [steps, ...lines.map(line => {
    const values = new Array(steps.length).fill(undefined);
    for (const [step, value] of line) values[place.get(step)] = value;
    return values;
  })];
}
function drawLoss() {
  const data = lossData();
  if (lossChart && lossChart.series.length === data.length) { lossChart.setData(data); label(); return; }
  lossChart?.destroy();
  const series = [{label: 'step'}, {label: 'loss', stroke: colour('accent'), width: 1.6, ...plain},
    {label: 'validation', stroke: colour('evaluation'), width: 1.6, points: {show: true, size: 6}},
    ...ghosts.map(() => ({label: 'lost', stroke: colour('ghost'), width: 1.4, dash: [2, 3], ...plain}))];
  const marks = chart => {
    const {ctx, bbox} = chart;
    ctx.save();
    ctx.strokeStyle = colour('change');
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    for (const [step, , , reason] of run.marks ?? []) {
      const x = Math.round(chart.valToPos(step, 'x', true)) + .5;
      if (reason === 'start' || x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
    }
    ctx.stroke();
    ctx.restore();
  };
  lossChart = new uPlot({...size('loss'), scales: {x: {time: false}}, series, axes: axes(), legend: {show: false},
    cursor: {drag: {x: false, y: false}}, hooks: {drawAxes: [marks], setCursor: [readLoss]}}, data, $('loss'));
  $('loss-keys').replaceChildren(make('span', 'loss', 'loss'), make('span', 'validation', 'validation'),
    ...(ghosts.length ? [make('span', 'lost and done again', 'ghost')] : []), make('span', 'change of membership', 'change'));
  label();
}
function label() {
  const last = curve.at(-1);
  $('loss').setAttribute('aria-label', last ? `Loss over steps; step ${last[0]}: ${lossText(last[1])}` : 'Loss over steps: none yet');
}
function readLoss(chart) {
  const index = chart.cursor.idx;
  if (index === null || index === undefined) return;
  const values = chart.series.map((series, which) => [series.label, chart.data[which][index]]).slice(1)
    .filter(each => each[1] !== undefined && each[1] !== null).map(([name, value]) => `${name} ${lossText(value)}`);
  $('loss-reading').textContent = `step ${count(chart.data[0][index])}: ${values.join(', ')}`;
}
function drawMembers() {
  const marks = new Map((run.marks ?? []).map(([step, , nodes]) => [step, nodes]));
  const steps = [...marks.keys()].sort((a, b) => a - b), nodes = steps.map(step => marks.get(step));
  if (steps.length) { steps.push(Math.max(run.step, steps.at(-1) + 1)); nodes.push(nodes.at(-1)); }
  if (memberChart) { memberChart.setData([steps, nodes]); return; }
  memberChart = new uPlot({...size('members'), legend: {show: false}, axes: axes(), cursor: {drag: {x: false, y: false}},
    scales: {x: {time: false}, y: {range: (chart, low, high) => [0, Math.max(1, high ?? 1) * 1.1]}},
    series: [{}, {stroke: colour('change'), width: 1.6, paths: uPlot.paths.stepped({align: 1}), ...plain}],
    hooks: {setCursor: [chart => {
      const index = chart.cursor.idx;
      if (index !== null && index !== undefined)
        $('members-reading').textContent = `from step ${count(chart.data[0][index])}: ${plural(chart.data[1][index], 'node')}`;
    }]}}, [steps, nodes], $('members'));
  $('members').setAttribute('aria-label', 'Nodes that take part, over steps');
}
function keys(id, chart) {
  $(id).addEventListener('keydown', event => {
    const move = {ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -1e9, End: 1e9}[event.key];
    const found = chart(), all = found?.data[0];
    if (move === undefined || !all?.length) return;
    event.preventDefault();
    const from = found.cursor.idx ?? (move < 0 ? all.length : -1);
    const index = Math.max(0, Math.min(all.length - 1, from + move));
    found.setCursor({left: found.valToPos(all[index], 'x'), top: 10});
  });
}
keys('loss', () => lossChart);
keys('members', () => memberChart);
function redraw() {
  lossChart?.destroy();
  memberChart?.destroy();
  lossChart = memberChart = null;
  if (!$('run-view').hidden && run.name) { drawLoss(); drawMembers(); }
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
addEventListener('resize', () => {
  lossChart?.setSize(size('loss'));
  memberChart?.setSize(size('members'));
});

// --- all runs ------------------------------------------------------------------------------
function showTable(found) {
  document.title = 'Holdfast: ' + plural(found.runs.length, 'run');
  $('title').textContent = plural(found.runs.length, 'run');
  setState('live');
  $('lead').textContent = '';
  rows($('runs'), found.runs.map(each => {
    const link = make('a', each.name);
    link.href = '#' + encodeURIComponent(each.name);
    return [[link, ''], [each.problem || each.state, BAD.includes(each.state) ? 'bad' : ''],
      [`${count(each.step)} / ${count(each.total_steps)}`, 'n'], [lossText(each.loss), 'n'],
      [`${si(each.tokens_per_second)} ${each.unit}/s`, 'n'], [percent(each.goodput), 'n'], [count(each.nodes), 'n'],
      [count(each.incidents), 'n'], [each.usd === null ? Number(each.node_hours.toPrecision(3)) + ' node-hours' : dollars(each.usd), 'n']];
  }));
}

// --- the stream ----------------------------------------------------------------------------
function show(news) {
  const isTable = 'runs' in news;
  $('table-view').hidden = !isTable;
  $('run-view').hidden = isTable;
  document.querySelector('nav').hidden = !location.hash;
  isTable ? showTable(news) : showRun(news);
}
function open() {
  stream?.close();
  const name = decodeURIComponent(location.hash.slice(1));
  run = {}; curve = []; ghosts = [];
  lossChart?.destroy();
  memberChart?.destroy();
  lossChart = memberChart = null;
  setState('loading');
  setProblem('');
  const mine = stream = new EventSource('events' + (name ? '?run=' + encodeURIComponent(name) : ''));
  stream.onmessage = event => {
    if (mine !== stream) return;
    const began = performance.now(), data = document.body.dataset;
    setProblem('');
    show(JSON.parse(event.data));
    data.refreshMs = (performance.now() - began).toFixed(1);
    data.refreshes = Number(data.refreshes ?? 0) + 1;
  };
  stream.addEventListener('missing', () => {
    mine.close();
    setState('unreadable');
    setProblem('There is no run of this name here any more.');
  });
  stream.onerror = () => {
    if (mine === stream) setProblem('The dashboard does not answer. This page tries again by itself.');
  };
}
if (location.search) history.replaceState(null, '', location.pathname + location.hash);
addEventListener('hashchange', open);
open();
