"""A stand-in for the MPS daemon of NVIDIA's driver: one process with a server below it."""

import os
import sys
from pathlib import Path

from waits import Watch

_PROGRAM = """\
#!{python}
import os, signal, subprocess, sys
from pathlib import Path
ready = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"], "control")
if sys.argv[1:] != ["-f"]:
    sys.exit(not ready.exists())
assert Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
if os.environ["CUDA_VISIBLE_DEVICES"] == "broken":
    Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "control.log").write_text("no such device")
    sys.exit(1)
server = subprocess.Popen(["sleep", "1000000"])
text = "\\n".join([str(os.getpid()), str(server.pid), os.environ["CUDA_VISIBLE_DEVICES"]])
Path({folder!r}, "new").write_text(text)
os.rename(Path({folder!r}, "new"), Path({folder!r}, f"{{ready.parent.parent.name}}.daemon"))
ready.touch()
signal.pause()
"""


class MpsPrograms:
    """The program in a folder, which goes into PATH, and the daemons that have run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "nvidia-cuda-mps-control"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        self.path = f"{folder}{os.pathsep}{os.environ['PATH']}"

    def daemons(self) -> dict[str, tuple[int, int, str]]:
        """Process ids of each daemon and its server, and the GPU, by the name of its directory."""
        found = {}
        for file in self._folder.glob("*.daemon"):
            daemon, server, gpu = file.read_text().split("\n")
            found[file.stem] = int(daemon), int(server), gpu
        return found

    def watch(self) -> Watch:
        """Watch all of them die."""
        return Watch([pid for daemon in self.daemons().values() for pid in daemon[:2]])
