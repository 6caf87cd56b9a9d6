"""Federations on NVIDIA FLARE. Only this package imports nvflare, which the extra `federation` installs."""

import os

os.environ.setdefault(
    "GRPC_VERBOSITY", "ERROR"
)  # read when gRPC is imported; else it writes about refused connections between our lines
