"""The compile gate: does the real Triton compile what a run used, for GPUs that are not here?

The emulator runs a kernel without a compiler, so it cannot see what a compiler refuses. It records what each
launch would have made the compiler compile (`fuzz.engine.emulator.specialisation`); here the same kernel files
are loaded under the real Triton and each specialisation is compiled for each architecture, in worker
processes, since a compiler can abort or hang. Nothing is executed and no GPU is needed.

    requests = {record.key: record for ... in recorded}
    for compilation in compile_all(requests, parse_arch("gfx942")): ...

`arch`: what to compile for. `wire`: specialisations as JSON. `signature`: what Triton is told about arguments.
`compiler`: one compilation, in this process. `jobs`: what the workers do. `gate`: the driver.
"""

from fuzz.engine.compile_gate.arch import Arch, ArchError, parse_arch
from fuzz.engine.compile_gate.gate import Compilation, Outcome, Request, compile_all
from fuzz.engine.compile_gate.resources import Resources

__all__ = ["Arch", "ArchError", "Compilation", "Outcome", "Request", "Resources", "compile_all", "parse_arch"]
