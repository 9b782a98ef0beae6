"""The handler `image_classifier`: the likeliest classes of a picture, each with its probability."""

from ts.handler_utils.timer import timed
from ts.torch_handler.vision_handler import Prepared, VisionHandler, imagenet
from ts.utils.util import map_class_to_label


class ImageClassifier(VisionHandler):
    """Answers with `topk` classes, by the labels of index_to_name.json."""

    topk = 5
    image_processing = Prepared(imagenet)

    def set_max_result_classes(self, topk):
        """Sets how many classes are named."""
        self.topk = topk

    def get_max_result_classes(self):
        """How many classes are named."""
        return self.topk

    @timed
    def postprocess(self, data):
        import torch

        probabilities, classes = torch.topk(torch.nn.functional.softmax(data, dim=1), self.topk, dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
