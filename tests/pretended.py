"""Several hosts on one: a world whose ranks share memory with some of the others only."""

from mpi4py import MPI


def pretended_hosts(world, sizes):
    """Return the world, as if so many ranks were on each of several hosts; none: as it is."""
    if not sizes:
        return world
    hosts = [host for host, ranks in enumerate(sizes) for _ in range(ranks)]

    class Pretended(MPI.Intracomm):
        def Split_type(self, kind, key=0):
            return self.Split(hosts[self.Get_rank()], key)

    return Pretended(world)
