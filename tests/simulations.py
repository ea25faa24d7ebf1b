"""Worlds whose launches a simulator runs again and again, in an order drawn from a seed."""

from mkernel_cp import settings
from mkernel_cp.transport import soft


def helpers(comms):
    """What gets turns beside the launches: network cards of software, and proxies."""
    networks = [comm._runtime.network for comm in comms if comm._runtime.network]
    return [soft.by_hand(), *(network.by_hand() for network in networks)] if networks else []


def assert_right(world, seeds, launches):
    """Check that all launches end well, with the right result, for so many seeds."""
    comms = [comm for comm, *_ in world.ranks]
    for seed in range(seeds):
        before = comms[0]._runtime.calls.signals.generation
        soft.configure(settings.SoftFabric(seed=seed))
        faults, _ = world.simulate(seed)
        assert not faults
        generations = {comm._runtime.calls.signals.generation for comm in comms}
        assert generations == {before + launches}, f"seed {seed}: not all launches ended well"
