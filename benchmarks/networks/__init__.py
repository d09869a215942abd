"""Networks that detent was not developed on: built in code, trained for seconds, exported to ONNX, with data."""

from networks.catalog import LARGE_NETWORKS, NETWORKS
from networks.network import Export, Network

__all__ = ["LARGE_NETWORKS", "NETWORKS", "Export", "Network"]
