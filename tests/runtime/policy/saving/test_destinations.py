from __future__ import annotations

from holdfast.policy.saving.destinations import why_save_now


def test_steps_end_and_stop() -> None:
    saved, reasons = 0, {}
    for step in range(1, 26):
        reason = why_save_now(step, 25, every_steps=10, last_saved=saved)
        if reason is not None:
            saved, reasons[step] = step, reason
    assert reasons == {10: "steps", 20: "steps", 25: "end"}
    assert why_save_now(7, 25, every_steps=10, is_stopping=True) == "stop"
    assert why_save_now(7, 25, every_steps=0) is None
    assert why_save_now(25, 25, every_steps=0) == "end"


def test_nothing_is_saved_twice() -> None:
    assert why_save_now(10, 25, every_steps=10, last_saved=10) is None
    assert why_save_now(10, 25, every_steps=10, last_saved=10, is_stopping=True) is None


def test_seconds() -> None:
    def at(seconds: float) -> str | None:
        return why_save_now(3, 25, every_steps=0, every_seconds=60, seconds_since_save=seconds)

    assert at(59.9) is None
    assert at(60.0) == "seconds"
    assert why_save_now(3, 25, every_steps=0, every_seconds=0, seconds_since_save=1e9) is None
