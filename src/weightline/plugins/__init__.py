"""What runs inside an engine's own process: numpy, torch and the standard library, nothing else.

An engine pins its packages; a plugin must not move them, so nothing here imports the codec (numba), the
records (msgspec) or the service (grpc). The follower, a process of its own, does the decoding and hands over
plain files (`exchange`).
"""
