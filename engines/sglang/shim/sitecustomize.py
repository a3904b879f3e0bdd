"""Declares torchvision's two operators before torchvision is imported.

The torchvision on package registries is a CUDA build: its extension does not load beside a CPU torch, so its
`register_fake("torchvision::nms")` raises at import. With the schemas declared (no kernels) the pure Python
part imports; nothing here calls them.
"""

import sys


class _TorchvisionSchemas:
    """A finder that finds nothing: it sees that torchvision is about to be imported."""

    library = None

    def find_spec(self, name, *_path_and_target):
        if name == "torchvision" and _TorchvisionSchemas.library is None:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _TorchvisionSchemas.library = library


sys.meta_path.insert(0, _TorchvisionSchemas())
