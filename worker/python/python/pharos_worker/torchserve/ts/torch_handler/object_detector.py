"""The handler `object_detector`: objects in an image and their locations."""

from ts.torch_handler.vision_handler import Prepared, VisionHandler
from ts.utils.util import map_class_to_label


def _tensor_only():
    from torchvision import transforms

    return transforms.Compose([transforms.ToTensor()])


class ObjectDetector(VisionHandler):
    """Returns the objects whose score reaches the threshold: `{LABEL: box, "score": score}`."""

    image_processing = Prepared(_tensor_only)
    threshold = 0.5

    def postprocess(self, data):
        return [self._things(found) for found in data]

    def _things(self, found):
        likely = found["scores"] >= self.threshold
        boxes, labels, scores = (found[name][likely].tolist() for name in ("boxes", "labels", "scores"))
        named = [map_class_to_label([[box]], self.mapping, [[label]])[0] for box, label in zip(boxes, labels)]
        return [{**thing, "score": score} for thing, score in zip(named, scores)]
