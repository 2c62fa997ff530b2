"""bench.gpu_run.world_engine with this CPU as its GPU, for rehearsals of the stage `world`."""

from __future__ import annotations

from bench.gpu_run import world_engine
from tests.support.gpu import emulated_world

if __name__ == "__main__":
    emulated_world.use()
    world_engine.main()
