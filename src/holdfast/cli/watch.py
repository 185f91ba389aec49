"""`holdfast watch`: the view of a run that another process trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from holdfast.api.views import record_line
from holdfast.checkpoint.restore.catalog import origin_of_weights
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import JournalJson, RunArgument
from holdfast.events import Record
from holdfast.launch.run.holder import HolderWatch, is_holder_gone
from holdfast.launch.run.lora_run import describe_first_weights
from holdfast.launch.run.runs import open_run
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.ordering import order_records
from holdfast.report.live import live
from holdfast.show.output import say
from holdfast.wire.journal import follow_journal

TRAINER_CHECK_AFTER_S = 5.0  # without a record, until the trainer is asked whether it is there

app = make_app("Follow a run from another terminal.")


@app.command()
def watch(run: RunArgument, json: JournalJson = False) -> int:
    """Show a run from its beginning until it ends. Ctrl-C leaves; the run continues.

    Exit code 1 when the trainer ended without a record of it: it was killed, or its machine was
    lost.

    \b
    Example:
      holdfast watch runs/quickstart
      holdfast watch run.yaml --json
    """
    found = open_run(run)
    holder = HolderWatch(found.folder)
    news = watch_until_gone(follow_journal(found.store), lambda: is_holder_gone(holder))
    try:
        if json:
            progress = RunProgress(found.config.train.steps)
            for batch in news:
                for record in order_records(batch):
                    print(record_line(record), flush=True)
                    progress.observe(record)
                if progress.is_over:
                    return 0
        else:
            origin = origin_of_weights(found.store)
            with live.LiveView(
                found.config.train.steps,
                imported_from=origin,
                first_weights=describe_first_weights(found.config),
            ) as view:
                live.watch_run(news, view)
            progress = view.progress
    except KeyboardInterrupt:
        return 0
    if progress.is_over:
        return 0
    say(
        f"no trainer is at work here: it ended without a word after step {progress.step}; "
        "the command that started it resumes from the last checkpoint"
    )
    return 1


def watch_until_gone(
    batches: Iterable[list[Record]],
    is_trainer_gone: Callable[[], bool],
    quiet_s: float = TRAINER_CHECK_AFTER_S,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[list[Record]]:
    """Yield the batches, until no record came for `quiet_s` seconds and `is_trainer_gone` says that
    the writer has ended."""
    heard = now()
    leaving = False
    for batch in batches:
        yield batch
        if batch:
            heard, leaving = now(), False
        elif leaving:  # and nothing was written between the question and now
            return
        elif now() - heard > quiet_s:
            heard, leaving = now(), is_trainer_gone()
