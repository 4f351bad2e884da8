"""What autoshard imports from torch's private modules and more than one file uses, or tracing. Checked with torch 2.13.

Each in one file of its own: the functional collectives (``runtime/collectives.py``), autograd's ``queue_callback``
(``runtime/gradients.py``), the registry of process groups (``checking/collectives.py``), autocast's state (``autocast.py``). The classes of
``torch._ops`` tell the targets of fx nodes apart wherever that is needed.
"""

from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module as graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensorMode", "TorchDispatchMode", "graph_module", "lazy_graph_modules", "pytree"]
