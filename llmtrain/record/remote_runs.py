"""A run at an address, such as the mirror of one that has lost its machine."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import cache_folder, digest, read_object
from llmtrain.locks import file_lock
from llmtrain.record.checkpoint import MANIFEST, find_fault, path_of, read_state
from llmtrain.record.folder import RECORDS
from llmtrain.record.history import History
from llmtrain.storage import Storage


class RemoteRun:
    """A run at an address, whose checkpoints can be downloaded.

    Args:
        name: the address of the run, or of one of its checkpoints.

    Attributes:
        name: its address as the user has written it.
        run_id: the id of the run.
        fingerprint_sha256: its fingerprint.

    Raises:
        UserError: if there is no run at the address.
    """

    def __init__(self, name: str) -> None:
        run, _, checkpoint = name.rstrip("/").partition("/checkpoints/step-")
        self.name = name
        record = History.at(run).record
        self.run_id = record.get("run_id")
        self.fingerprint_sha256 = record.get("fingerprint_sha256")
        self._storage = Storage(run)
        # The manifest comes last, so a checkpoint without one is incomplete.
        names = "\n".join(self._storage.sizes("checkpoints"))
        numbers = re.findall(rf"(?m)^checkpoints/step-(\d{{8,}})/{MANIFEST}$", names)
        named = (int(number) for number in numbers if checkpoint in ("", number))
        self._steps = sorted(named, reverse=True)

    def newest_checkpoint(self, folder: Path, own: Path | None = None) -> Path | None:
        """Return the newest intact checkpoint, that of a run folder or one at the address.

        One at the address is downloaded into the folder, with ``run.json``, the logs and the sets
        of rounds. The best checkpoint of the run is downloaded, too, if the folder does not have
        it.

        Args:
            folder: the run folder. The caller holds its lock.
            own: the newest intact checkpoint in it.

        Returns:
            ``None`` if there is no checkpoint.

        Raises:
            UserError: if there are checkpoints, and none is intact.
        """
        own_step = 0 if own is None else read_state(own)["step"]
        records = [*RECORDS, *self._storage.sizes("rounds")]
        newer = (self._fetch(step, folder, records) for step in self._steps if step > own_step)
        newest = next(filter(None, newer), own)
        if newest is None and not self._steps:
            return None
        if newest is None:
            raise UserError(
                f"--resume_from_checkpoint {self.name}: no checkpoint there is intact; leave the "
                "flag out to start from the beginning."
            )
        place = own if newest is own else f"{self._storage}/checkpoints/{newest.name}"
        say("resume", f"uses {place}, which is intact")

        best = read_state(newest).get("best")
        if best and best["step"] in self._steps:
            self._fetch(best["step"], folder)
        return newest

    def cached_checkpoint(self) -> Path:
        """Return the newest intact checkpoint, in a run folder in the cache."""
        key = {"address": str(self._storage), "run_id": self.run_id}
        folder = cache_folder() / "mirrors" / digest(key)[:16]
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / ".lock"):
            newest = self.newest_checkpoint(folder)
        if newest is None:
            raise UserError(f"--resume_from_checkpoint {self.name}: there is no checkpoint yet.")
        return newest

    def _fetch(self, step: int, folder: Path, records: Sequence[str] = ()) -> Path | None:
        """Download a checkpoint into a run folder, unless the folder has it.

        Args:
            step: the step of the checkpoint.
            folder: the run folder.
            records: files of the run that are downloaded with it.

        Returns:
            The checkpoint in the folder; ``None`` if the one at the address is damaged.
        """
        target = path_of(folder / "checkpoints", step)
        if (
            find_fault(target, self.fingerprint_sha256) is None
        ):  # an earlier start has downloaded it
            return target

        # A start that is killed here leaves a free folder. The next one begins the download again.
        working = folder / ".tmp-download"
        shutil.rmtree(working, ignore_errors=True)
        downloaded = path_of(working / "checkpoints", step)
        prefix = f"checkpoints/{target.name}"
        self._storage.download_all([f"{prefix}/{MANIFEST}"], working)
        files = read_object(downloaded / MANIFEST).get("files")
        self._storage.download_all([f"{prefix}/{name}" for name in files or ()], working)
        fault = find_fault(downloaded, self.fingerprint_sha256)
        if fault is not None:
            say("resume", f"{self._storage}/{prefix} is damaged: {fault}")
            return None

        self._storage.download_all(records, folder)
        target.parent.mkdir(exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        downloaded.rename(target)
        return target
