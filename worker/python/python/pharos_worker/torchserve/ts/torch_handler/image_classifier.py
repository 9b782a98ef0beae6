"""The handler `image_classifier`: the most likely classes of an image with their probabilities."""

from ts.handler_utils.timer import timed
from ts.torch_handler.vision_handler import Prepared, VisionHandler, imagenet
from ts.utils.util import map_class_to_label


class ImageClassifier(VisionHandler):
    """Returns the `topk` most likely classes, with the labels in index_to_name.json."""

    topk = 5
    image_processing = Prepared(imagenet)

    def set_max_result_classes(self, topk):
        """Sets the number of classes to return."""
        self.topk = topk

    def get_max_result_classes(self):
        """Returns the number of classes to return."""
        return self.topk

    @timed
    def postprocess(self, data):
        import torch

        probabilities, classes = torch.topk(torch.nn.functional.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
