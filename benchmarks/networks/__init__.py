"""Networks outside the zoo, with data: built in code, trained for seconds, exported to ONNX."""

from networks.catalog import LARGE_NETWORKS, NETWORKS
from networks.fresh_catalog import FRESH_NETWORKS, LIBRARY_NETWORKS
from networks.network import Export, Network

__all__ = ["FRESH_NETWORKS", "LARGE_NETWORKS", "LIBRARY_NETWORKS", "NETWORKS", "Export", "Network"]
