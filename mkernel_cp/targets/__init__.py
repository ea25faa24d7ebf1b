"""What differs between targets on the Python side: memory, arrays, launches. One module each.

Both give a class with the same members: `host.HostTarget` says what they are.
"""
