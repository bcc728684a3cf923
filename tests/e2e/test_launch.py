"""Plain processes: started, restarted, and gone when whoever started them is, however that ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from deploy.config import SupervisionSettings
from deploy.errors import StageFailedError
from deploy.processes import ProcessLauncher
from deploy.stages import NgramStage
from services.ngram.settings import NgramSettings
from stagespec.v1.stage_pb2 import GetInfoRequest, StageInfo
from stagespec.v1.stage_pb2_grpc import StageServiceStub

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = SupervisionSettings(start_timeout_s=60, backoff_s=0.05, drain_s=1)
STAGE = NgramStage("ngram")


async def ask(address: str) -> StageInfo:
    async with grpc.aio.insecure_channel(address) as channel:
        return (await StageServiceStub(channel).GetInfo(GetInfoRequest(), timeout=10)).info


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.1)
    return False


async def test_a_killed_stage_is_started_again_and_its_new_address_reported():
    moves: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()

    async def moved(name: str, old_address: str, address: str) -> None:
        moves.put_nowait((name, old_address, address))
        if moved_before:
            return
        moved_before.append(address)
        raise RuntimeError("whoever was told could not follow")

    moved_before: list[str] = []

    launcher = ProcessLauncher(SETTINGS)
    try:
        addresses = await launcher.start({"one": STAGE, "two": STAGE}, moved)
        first = {name: await ask(address) for name, address in addresses.items()}
        assert {info.name for info in first.values()} == {"one", "two"}
        os.kill(first["one"].process_id, signal.SIGKILL)
        name, old_address, address = await asyncio.wait_for(moves.get(), 60)
        assert (name, old_address) == ("one", addresses["one"])
        # The move was not followed, so the stage is still taken to be where it was at first.
        os.kill((await ask(address)).process_id, signal.SIGKILL)
        name, old_address, address = await asyncio.wait_for(moves.get(), 60)
        assert (name, old_address) == ("one", addresses["one"])
        again = await ask(address)
        assert (again.name, again.process_id != first["one"].process_id) == ("one", True)
    finally:
        await launcher.stop(1.0)
    for pid in (first["two"].process_id, again.process_id):
        assert wait_until_gone(pid)


async def test_a_stage_that_cannot_start_says_why_and_leaves_nothing():
    async def moved(name: str, old_address: str, address: str) -> None:
        raise AssertionError("nothing can have moved")

    broken = NgramStage("ngram", NgramSettings(table="/none/here.ngram"))
    launcher = ProcessLauncher(SETTINGS)
    with pytest.raises(StageFailedError, match=r"stage broken: .*/none/here\.ngram"):
        await launcher.start({"fine": STAGE, "broken": broken}, moved)
    assert not launcher._children


PROGRAM = """
import asyncio, sys
from deploy.config import SupervisionSettings
from deploy.processes import ProcessLauncher
from deploy.stages import NgramStage
async def main():
    async def moved(name, old_address, address): pass
    addresses = await ProcessLauncher(SupervisionSettings()).start({"one": NgramStage("ngram")}, moved)
    print(addresses["one"], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_stage_ends_with_its_launcher_even_if_that_is_killed():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    launcher = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    pid = (await ask(launcher.stdout.readline().strip())).process_id
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert wait_until_gone(pid)


async def test_a_stage_by_hand_serves_until_it_is_told_to_end():
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    command = [sys.executable, "-m", "deploy.cli.main", "stage", "ngram", "--listen", "127.0.0.1:0"]
    stage = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert stage.stdout is not None
    address = stage.stdout.readline().split()[-1]
    assert (await ask(address)).implementation == "ngram"
    second = subprocess.run(
        [*command[:-1], address], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert second.returncode != 0
    assert address in second.stderr
    assert (await ask(address)).process_id == stage.pid
    stage.send_signal(signal.SIGTERM)
    assert stage.wait(30) == 0
    stage.stdout.close()
