"""The base class of image handlers."""

import base64
import functools
import io
from abc import ABC

from ts.handler_utils.timer import timed
from ts.torch_handler.base_handler import BaseHandler


class Prepared:
    """The class attribute `image_processing`, created on first use so that torchvision is only imported then."""

    def __init__(self, make):
        self._make = functools.cache(make)

    def __get__(self, instance, owner):
        return self._make()


def imagenet():
    """Returns the preprocessing of models trained on ImageNet: an image to a tensor of 3 x 224 x 224."""
    from torchvision import transforms

    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), normalize]
    return transforms.Compose(steps)


class VisionHandler(BaseHandler, ABC):
    """Accepts images as files, base64 strings or lists of numbers, which `image_processing` converts to tensors."""

    def initialize(self, context):
        super().initialize(context)
        self.ig = self._gradients()
        if not context.system_properties.get("limit_max_image_pixels"):
            from PIL import Image

            Image.MAX_IMAGE_PIXELS = None

    def _gradients(self):
        try:
            from captum.attr import IntegratedGradients
        except ImportError:
            # Only needed for explanations.
            return None
        return IntegratedGradients(self.model)

    @timed
    def preprocess(self, data):
        import torch

        return torch.stack([self._picture(row.get("data") or row.get("body")) for row in data]).to(self.device)

    def _picture(self, image):
        import torch

        if isinstance(image, str):
            image = base64.b64decode(image)
        if isinstance(image, (bytes, bytearray)):
            from PIL import Image

            return self.image_processing(Image.open(io.BytesIO(image)))
        return torch.FloatTensor(image)

    def get_insights(self, tensor_data, _, target=0):
        """Returns the contribution of each value of an image to the class."""
        if self.ig is None:
            raise RuntimeError("explanations need the Python package 'captum', which is not installed")
        return self.ig.attribute(tensor_data, target=target, n_steps=15).tolist()
