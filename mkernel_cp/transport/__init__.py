"""The network between nodes: the queue from kernels, the proxy, and the software network card."""
