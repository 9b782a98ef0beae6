"""The handler `text_classifier`: the probability of each class of a text. It requires batchSize 1."""

from ts.handler_utils.text_utils import ngrams_iterator
from ts.torch_handler.text_handler import TextHandler
from ts.utils.util import map_class_to_label


class TextClassifier(TextHandler):
    """Returns all classes, with the labels in index_to_name.json."""

    ngrams = 2

    def preprocess(self, data):
        import torch

        text = data[0].get("data") or data[0].get("body")
        if isinstance(text, (bytes, bytearray)):
            text = text.decode("utf-8")
        text = self._expand_contractions(self._remove_html_tags(text).lower())
        tokens = self._tokenize(self._remove_punctuation(self._remove_accented_characters(text)))
        numbers = [self.source_vocab[token] for token in ngrams_iterator(tokens, self.ngrams)]
        return torch.as_tensor(numbers, device=self.device), tokens

    def inference(self, data, *args, **kwargs):
        import torch

        return super().inference(data[0], torch.as_tensor([0], device=self.device))

    def postprocess(self, data):
        import torch

        return map_class_to_label(torch.nn.functional.softmax(data, dim=-1).tolist(), self.mapping)

    def get_insights(self, text_preprocess, _, target=0):
        """Returns the contribution of each word to the class."""
        if self.lig is None:
            raise RuntimeError("explanations need the Python package 'captum', which is not installed")
        import torch
        from captum.attr import TokenReferenceBase

        numbers, tokens = text_preprocess
        reference = TokenReferenceBase().generate_reference(numbers.shape[0], device=self.device).squeeze(0)
        offsets = torch.tensor([0], device=self.device)
        attributions = self.lig.attribute(
            numbers, reference, additional_forward_args=(offsets,), return_convergence_delta=False, target=target
        )
        return [{"importances": self.summarize_attributions(attributions).tolist(), "words": self.get_word_token(tokens)}]
