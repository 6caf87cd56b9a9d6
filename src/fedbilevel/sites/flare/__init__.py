"""Federations on NVIDIA FLARE. Only this package imports nvflare, which the extra `federation`
installs."""

import os

# read when gRPC is imported; otherwise gRPC prints refused connections between our lines
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
