"""Networks outside the zoo, with data: built in code, trained for seconds, exported to ONNX."""

from networks.catalog import LARGE_NETWORKS, NETWORKS
from networks.network import Export, Network

__all__ = ["LARGE_NETWORKS", "NETWORKS", "Export", "Network"]
