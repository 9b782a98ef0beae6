"""The handler `image_segmenter`: the class of each pixel of an image with its probability."""

from ts.torch_handler.vision_handler import Prepared, VisionHandler, imagenet


class ImageSegmenter(VisionHandler):
    """Returns rows of pixels, each `[class, probability]`."""

    image_processing = Prepared(imagenet)

    def postprocess(self, data):
        import torch

        best = torch.nn.functional.softmax(data["out"], dim=1).max(dim=1)
        return torch.stack([best.indices.to(best.values.dtype), best.values], dim=3).tolist()
