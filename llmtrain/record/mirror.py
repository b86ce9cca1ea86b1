"""A copy of a run in object storage, which follows the run and outlives its machine.

At the address, files have the names that they have in the run folder. ``claim.json`` names the run
that writes there. A checkpoint gets its manifest last, and loses it first: without a manifest, it
does not count as a checkpoint.
"""

import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text, read_object
from llmtrain.record.checkpoint import MANIFEST, checkpoints
from llmtrain.record.folder import RECORDS, RunFolder
from llmtrain.storage import Storage, StorageError

_CLAIM = "claim.json"
_CLOSE_SECONDS = 3600.0  # for the last upload
_PAUSE_SECONDS = 30.0  # between two uploads


class ClaimError(UserError):
    """An address belongs to another run, or to a later start of this run."""


class Mirror:
    """Uploads what a run writes, on a thread. The run waits for it only at its end.

    An upload that fails is an event, and the next one tries again. There is one exception: if the
    storage fails when a run starts, :meth:`start` raises the error, because the user is still there
    to correct a wrong name or an expired login. If the run has been mirrored before, as in a
    restart by a launcher, it is an event like any other.

    The claim of another run ends the run if it is found at the start, and otherwise the mirroring.

    Args:
        address: the folder in object storage.
        writer: writes the run folder.
        run_id: the id of the run. Only one run may use an address.
        record_event: prints an event of a kind, and records it in the run folder.
        is_restored: whether the start has looked for a newer checkpoint at the address.
    """

    def __init__(
        self,
        address: str,
        writer: RunFolder,
        run_id: str,
        record_event: Callable[[str, str], None],
        is_restored: bool = False,
    ) -> None:
        self.storage = Storage(address, "--mirror ", writable=True)
        self.writer = writer
        self.claim = {
            "run_id": run_id,
            "start_id": writer.start_id,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "host": platform.node(),
        }
        self._record_event = record_event
        self._is_restored = is_restored
        self._has_claim = False
        self._is_failing = False
        self._is_ending = threading.Event()
        self._complete: set[int] = set()  # steps of checkpoints that are there
        self._uploaded: dict[Path, int] = {}  # other files, and when they had last changed
        self._thread = threading.Thread(target=self._follow, name="llmtrain-mirror", daemon=True)

    def start(self) -> None:
        """Claim the address, and begin to upload.

        Raises:
            UserError: if another run has claimed the address, or if the storage fails.
        """
        mirrored_step = read_object(self.writer.path / "status.json").get("mirrored_step")
        try:
            self._take_claim()
        except StorageError:  # if the run has been mirrored before, its upload tries again
            if mirrored_step is None:
                raise
        self._thread.start()

    def close(self) -> None:
        """Upload the rest, and wait for it."""
        self._is_ending.set()
        if self._thread.is_alive():  # it has begun, and has not lost its claim
            say("mirror", f"uploads the rest to {self.storage}")
            self._thread.join(_CLOSE_SECONDS)

    def _follow(self) -> None:
        """Upload what the run writes, until it ends or another one has the address."""
        is_last = False
        while True:
            try:
                self._take_claim()
                self._upload(is_last)
                self._is_failing = False
            except Exception as error:  # of the storage, the disk, or a library
                has_lost = isinstance(error, ClaimError)
                if has_lost or not self._is_failing:
                    self._record_event("mirror", f"{first_line(error)} The run goes on.")
                self._is_failing = True
                # A new session reads a login that was renewed.
                self.storage = Storage(str(self.storage), "--mirror ", writable=True)
                is_last = is_last or has_lost
            if is_last:
                return
            # A run that ends does not wait for the pause, and gets one more upload.
            is_last = self._is_ending.wait(_PAUSE_SECONDS)

    def _take_claim(self) -> None:
        """Claim the address, or check that this start still has it.

        Raises:
            ClaimError: if another run has it, or if a later start of this run has taken it over.
        """
        content = json_text(self.claim).encode()
        if not self.storage.create(_CLAIM, content):
            other = json.loads(self.storage.read(_CLAIM))
            if self._has_claim or other["run_id"] != self.claim["run_id"]:
                raise ClaimError(
                    f"--mirror {self.storage} is claimed by run {other['run_id']} on "
                    f"{other['host']} since {other['time']}; choose another address."
                )
            if not self._is_restored:
                self._check_newest_step()
            self.storage.write(_CLAIM, content)
        self._has_claim = True

    def _check_newest_step(self) -> None:
        """Raise :class:`ClaimError` if the run has gone on elsewhere, and its mirror has more."""
        names = self.storage.sizes("checkpoints")
        steps = [_step_of(Path(name).parent) for name in names if Path(name).name == MANIFEST]
        own_steps = map(_step_of, checkpoints(self.writer.path / "checkpoints"))
        if max(steps, default=0) > max(own_steps, default=0):
            raise ClaimError(
                f"--mirror {self.storage} has step {max(steps)} of this run, and its folder has no "
                f"such step; add --resume_from_checkpoint {self.storage}."
            )

    def _upload(self, is_last: bool) -> None:
        """Upload the logs and the newest checkpoint; at the end of the run, all that it has."""
        folder = self.writer.path
        paths = [folder / name for name in RECORDS]
        saved = checkpoints(folder / "checkpoints")
        missing = [path for path in saved if _step_of(path) not in self._complete]
        if is_last:
            paths += folder.glob("model/**/*")
        elif saved:  # while all were uploaded, a newer one might come
            best = read_object(saved[-1] / "state.json").get("best") or {}
            wanted = (_step_of(saved[-1]), best.get("step"))
            missing = [path for path in missing if _step_of(path) in wanted]
        # They come before a checkpoint in their round, and the manifest last.
        for manifest in folder.glob("rounds/*/manifest.json"):
            paths += [*manifest.parent.glob("*.safetensors"), *manifest.parent.glob("tokenizer/*")]
            paths.append(manifest)

        # Object stores cannot append, so a log is uploaded whole.
        for path in filter(Path.is_file, paths):
            changed = path.stat().st_mtime_ns
            if self._uploaded.get(path) != changed:
                self.storage.upload(path.relative_to(folder).as_posix(), path)
                self._uploaded[path] = changed
        for path in reversed(missing):
            self._upload_checkpoint(path)
        if self._complete:
            self._prune()
            self.writer.set_mirrored_step(max(self._complete))
        # At the address, a run is finished only if its model is there.
        status = folder / "status.json"
        if is_last or read_object(status).get("state") == "running":
            self.storage.upload(status.name, status)

    def _upload_checkpoint(self, path: Path) -> None:
        """Upload a checkpoint, unless it is there, or the run deletes it meanwhile.

        Raises:
            StorageError: if a file has not arrived in full.
        """
        place = f"checkpoints/{path.name}"
        # The run may delete the checkpoint meanwhile.
        links = self.writer.path / ".tmp-mirror"
        shutil.rmtree(links, ignore_errors=True)
        manifest_name = f"{place}/{MANIFEST}"
        try:
            shutil.copytree(path, links, copy_function=os.link)
            manifest = (links / MANIFEST).read_bytes()
            # After a crash, a run may have made the same step again with other bits.
            present = {manifest_name} & self.storage.sizes(place).keys()
            if not present or self.storage.read(manifest_name) != manifest:
                self.storage.delete(present)
                files = json.loads(manifest)["files"]
                for name in files:
                    self.storage.upload(f"{place}/{name}", links / name)
                sizes = self.storage.sizes(place)
                if any(sizes.get(f"{place}/{name}") != files[name]["bytes"] for name in files):
                    raise StorageError(f"{self.storage}/{place} has not arrived in full.")
                self.storage.write(manifest_name, manifest)
            self._complete.add(_step_of(path))
        except (FileNotFoundError, shutil.Error):
            if path.exists():  # so it was the storage that lacks something
                raise
        finally:
            shutil.rmtree(links, ignore_errors=True)

    def _prune(self) -> None:
        """Delete checkpoints that are older than two complete ones, unless the run has them."""
        *_, second, _ = [0, *sorted(self._complete)]
        folder = self.writer.path
        doomed = []
        for name in self.storage.sizes("checkpoints"):
            path = folder.joinpath(*Path(name).parts[:2])
            is_own = path.name.startswith("step-")
            if is_own and _step_of(path) < second and not path.exists():
                self._complete.discard(_step_of(path))
                doomed.append(name)
        # First the manifests: half of a checkpoint must not count as one.
        self.storage.delete(sorted(doomed, key=lambda name: not name.endswith(MANIFEST)))


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
