"""What processes say reaches its file, and a file that takes nothing holds up no process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from holdfast.elastic.node.output_relay import MAX_WAITING_BYTES, TAIL_BYTES, OutputRelay


def test_lines_are_in_memory_at_once_and_in_the_file_at_the_end(tmp_path: Path) -> None:
    async def body() -> None:
        relay = OutputRelay()
        write_fd, output = relay.open(tmp_path / "logs" / "standby.log")
        os.write(write_fd, b"it begins\n")
        assert output.last_lines(1) == "it begins"
        output.send_to(tmp_path / "logs" / "rank0.log")
        os.write(write_fd, b"it works\nit fails\n")
        os.close(write_fd)
        assert output.last_lines(2) == "it works\nit fails"
        await relay.close()

    asyncio.run(body())
    assert (tmp_path / "logs" / "standby.log").read_text() == "it begins\n"
    assert (tmp_path / "logs" / "rank0.log").read_text() == "it works\nit fails\n"


def test_what_cannot_be_written_is_dropped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    lost = b"x" * 100 + b"\n"

    async def body() -> None:
        relay = OutputRelay()
        write_fd, output = relay.open(tmp_path / "logs" / "rank0.log")
        os.write(write_fd, lost)
        assert output.last_lines(1) == "x" * 100
        async with asyncio.timeout(60):
            while output.dropped_bytes < len(lost):
                await asyncio.sleep(0.01)
        (tmp_path / "logs").unlink()
        os.write(write_fd, b"there is room again\n")
        os.close(write_fd)
        await relay.close()

    asyncio.run(body())
    said = (tmp_path / "logs" / "rank0.log").read_text()
    assert said == f"({len(lost)} bytes of output could not be written)\nthere is room again\n"


def test_a_run_folder_that_was_moved_away_is_not_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = run / "logs" / "0000000001" / "rank0.log"
    run.mkdir()

    async def body() -> None:
        relay = OutputRelay()
        write_fd, output = relay.open(log)
        os.write(write_fd, b"it begins\n")
        async with asyncio.timeout(60):
            while not log.exists() or not log.stat().st_size:
                await asyncio.sleep(0.01)
        run.rename(tmp_path / "moved")
        os.write(write_fd, b"it was away\n")
        async with asyncio.timeout(60):
            while not output.dropped_bytes:
                await asyncio.sleep(0.01)
        (tmp_path / "moved").rename(run)
        os.write(write_fd, b"it is back\n")
        os.close(write_fd)
        await relay.close()

    asyncio.run(body())
    said = log.read_text()
    assert said.startswith("it begins\n")
    assert said.endswith("it is back\n")


def test_a_file_that_hangs_holds_up_neither_process_nor_agent(tmp_path: Path) -> None:
    """A FIFO without a reader: an attempt to open it waits for ever, as on a disk that hangs."""
    os.mkfifo(tmp_path / "rank0.log")

    async def body() -> tuple[int, str]:
        relay = OutputRelay()
        write_fd, output = relay.open(tmp_path / "rank0.log")
        line, written = b"y" * 1023 + b"\n", 0
        while written < 3 * MAX_WAITING_BYTES:
            written += os.write(write_fd, line)
            if written % (256 << 10) == 0:
                output.last_lines(1)
        os.write(write_fd, b"the last word\n")
        return output.waiting_bytes, output.last_lines(1)

    waiting, last = asyncio.run(body())
    assert waiting <= MAX_WAITING_BYTES
    assert last == "the last word"
    assert TAIL_BYTES < MAX_WAITING_BYTES
