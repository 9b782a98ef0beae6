"""The base class of text handlers."""

import os
import re
import string
import unicodedata
from abc import ABC

from ts.handler_utils.text_utils import get_tokenizer
from ts.torch_handler.base_handler import BaseHandler
from ts.torch_handler.contractions import CONTRACTION_MAP
from ts.utils.util import CLEANUP_REGEX

# Longest first, so that "can't've" is not matched as "can't".
CONTRACTIONS_PATTERN = re.compile(
    "|".join(re.escape(short) for short in sorted(CONTRACTION_MAP, key=len, reverse=True)), re.IGNORECASE
)
PUNCTUATION = str.maketrans("", "", string.punctuation)


class TextHandler(BaseHandler, ABC):
    """Loads the vocabulary of the model (`source_vocab.pt`), and has methods to normalize texts."""

    def __init__(self):
        super().__init__()
        self.source_vocab = None
        self.tokenizer = get_tokenizer("basic_english")
        self.input_text = None
        self.lig = None

    def initialize(self, context):
        import torch

        super().initialize(context)
        self.initialized = False
        named = self.manifest["model"].get("sourceVocab")
        self.source_vocab = torch.load(named or self.get_source_vocab_path(context))
        self.lig = self._gradients()
        self.initialized = True

    def _gradients(self):
        try:
            from captum.attr import LayerIntegratedGradients
        except ImportError:
            # Only needed for explanations.
            return None
        return LayerIntegratedGradients(self.model, self.model.embedding)

    def get_source_vocab_path(self, ctx):
        """Returns the path of the vocabulary."""
        path = os.path.join(ctx.system_properties.get("model_dir"), "source_vocab.pt")
        if not os.path.isfile(path):
            raise Exception(f"Missing the source_vocab file: {path}")
        return path

    def _expand_contractions(self, text):
        def expand(found):
            short = found.group(0)
            # Keep an initial capital.
            return short[0] + CONTRACTION_MAP[short.lower()][1:]

        return CONTRACTIONS_PATTERN.sub(expand, text).replace("'", "")

    def _remove_accented_characters(self, text):
        return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()

    def _remove_html_tags(self, text):
        return CLEANUP_REGEX.sub("", text)

    def _remove_punctuation(self, text):
        return text.translate(PUNCTUATION)

    # The name used by older handlers.
    _remove_puncutation = _remove_punctuation

    def _tokenize(self, text):
        return self.tokenizer(text)

    def get_word_token(self, input_tokens):
        """Returns tokens without the byte-pair encoding's mark for a space."""
        return [token.replace("\u0120", "") for token in input_tokens]

    def summarize_attributions(self, attributions):
        """Returns one number for each token."""
        import torch

        attributions = torch.nn.functional.softmax(attributions, dim=-1)
        return attributions / torch.norm(attributions.sum(dim=-1))
