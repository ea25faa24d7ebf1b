"""The benchmark: operators beside the same work by other means, and the floor of both."""
