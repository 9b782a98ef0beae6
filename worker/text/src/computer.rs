//! Computes texts with the graph of a model.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pharos::error::InferError;
use pharos::model::pooling::PoolingTask;
use pharos::model::text_files::TextModel;
use pharos_backend::run_error;
use pharos_worker::GraphTensor;

use crate::graph::Graph;
use crate::heads;
use crate::pooling::{TokenVectors, normalize};
use crate::results::Value;
use crate::tokens::{Texts, Tokens};

/// A text that is ready to be computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Prepared {
    pub(crate) tokens: Tokens,
    /// The text, for results that quote it.
    pub(crate) text: String,
    pub(crate) normalize: bool,
    pub(crate) raw_scores: bool,
    /// The number of predictions for a mask.
    pub(crate) predictions: usize,
}

/// The results of texts that are computed together.
pub(crate) type Computed = Result<Vec<Result<Value, InferError>>, InferError>;

/// A model with its graph.
pub(crate) struct Computer {
    pub(crate) model: TextModel,
    pub(crate) texts: Texts,
    graph: Box<dyn Graph>,
    /// What each input of the graph takes.
    feeds: Vec<Feed>,
    /// The output of the graph that is read.
    output: usize,
    /// Whether it has numbers for each token, not for each text.
    is_of_tokens: bool,
    /// The token in place of which others are found.
    mask: u32,
}

/// What an input of the graph takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Feed {
    Ids,
    Mask,
    Types,
    Positions,
}

impl Computer {
    /// Finds the inputs and the output of a graph that a model needs.
    ///
    /// # Errors
    /// The graph does not have them: the text is the end of a sentence about it.
    pub(crate) fn new(
        model: TextModel,
        texts: Texts,
        graph: Box<dyn Graph>,
    ) -> Result<Self, String> {
        let feeds = graph.inputs().iter().map(feed).collect::<Result<_, _>>()?;
        let (output, is_of_tokens) = chosen_output(&model, graph.outputs())?;
        let mask = match (model.task, &model.mask_token) {
            (PoolingTask::FillMask, None) => {
                return Err(
                    "is for masks, and the files of the tokenizer have no 'mask_token'".to_owned()
                );
            }
            (PoolingTask::FillMask, Some(token)) => texts.id(token).ok_or_else(|| {
                format!("is for masks, and the vocabulary does not have the 'mask_token' '{token}'")
            })?,
            _ => 0,
        };
        Ok(Self { model, texts, graph, feeds, output, is_of_tokens, mask })
    }

    /// The engine with its version.
    pub(crate) fn engine(&self) -> String {
        self.graph.engine()
    }

    /// Computes texts together.
    ///
    /// # Errors
    /// The graph fails; each text may fail by itself too.
    pub(crate) fn run(&self, texts: &[&Prepared]) -> Computed {
        let length = texts.iter().map(|text| text.tokens.ids.len()).max().unwrap_or(0);
        let inputs: Vec<Vec<i64>> = self
            .feeds
            .iter()
            .map(|feed| fed(*feed, texts, length, self.model.first_position))
            .collect();
        let mut values = Vec::with_capacity(texts.len());
        let Self { model, texts: tokenizer, is_of_tokens, mask, .. } = self;
        let head = Head { model, tokenizer, is_of_tokens: *is_of_tokens, mask: *mask };
        let mut read = |shape: &[usize], computed: &[f32]| {
            values = head.read(shape, computed, texts, length)?;
            Ok(())
        };
        // A thread that panics would leave its requests without an answer.
        catch_unwind(AssertUnwindSafe(|| {
            self.graph.run(texts.len(), length, &inputs, self.output, &mut read)
        }))
        .unwrap_or_else(|_| Err(run_error("the computation failed unexpectedly")))?;
        Ok(values)
    }
}

/// Returns what an input of a graph takes.
fn feed(port: &GraphTensor) -> Result<Feed, String> {
    match port.name.as_str() {
        "input_ids" => Ok(Feed::Ids),
        "attention_mask" => Ok(Feed::Mask),
        "token_type_ids" => Ok(Feed::Types),
        "position_ids" => Ok(Feed::Positions),
        name => Err(format!(
            "has the input '{name}'; a text model has input_ids, attention_mask, token_type_ids and \
             position_ids"
        )),
    }
}

/// Returns the output of a graph that a model needs, and whether it has numbers for each token.
fn chosen_output(model: &TextModel, outputs: &[GraphTensor]) -> Result<(usize, bool), String> {
    let named = |names: &[&str]| {
        names.iter().find_map(|name| outputs.iter().position(|output| output.name == *name))
    };
    let of_rank = |rank: usize| {
        outputs
            .iter()
            .position(|output| output.rank == Some(rank) && output.name != "pooler_output")
    };
    let listed =
        || outputs.iter().map(|output| output.name.as_str()).collect::<Vec<_>>().join(", ");
    match model.task {
        PoolingTask::Embed => {
            let of_texts = named(&["sentence_embedding"]).or(of_rank(2));
            let of_tokens = named(&["last_hidden_state", "token_embeddings"]).or(of_rank(3));
            if model.needs_whole_graph || model.pooling.is_empty() {
                let found = of_texts.map(|output| (output, false));
                return found.ok_or_else(|| match model.needs_whole_graph {
                    true => format!(
                        "has the outputs {}: the model has more modules than a transformer and a pooling, \
                         and needs a graph with all of them and the output 'sentence_embedding'",
                        listed()
                    ),
                    false => format!(
                        "has the outputs {}, and no file says how the vector of a text is made of them: \
                         set the parameter 'pooling' to cls, mean, max or lasttoken",
                        listed()
                    ),
                });
            }
            of_tokens
                .map(|output| (output, true))
                .or(of_texts.map(|output| (output, false)))
                .ok_or_else(|| format!("has the outputs {} and no 'last_hidden_state'", listed()))
        }
        task => {
            let is_of_tokens = matches!(task, PoolingTask::ClassifyTokens | PoolingTask::FillMask);
            let only = (outputs.len() == 1).then_some(0);
            named(&["logits"])
                .or(only)
                .map(|output| (output, is_of_tokens))
                .ok_or_else(|| format!("has the outputs {} and no 'logits'", listed()))
        }
    }
}

/// Returns the numbers of an input of the graph, for all texts, padded to this length.
fn fed(feed: Feed, texts: &[&Prepared], length: usize, first_position: usize) -> Vec<i64> {
    let mut numbers = Vec::with_capacity(texts.len() * length);
    for Prepared { tokens, .. } in texts {
        let end = numbers.len() + length;
        let count = tokens.ids.len() as i64;
        match feed {
            Feed::Ids => numbers.extend(tokens.ids.iter().map(|id| i64::from(*id))),
            Feed::Mask => numbers.extend((0..count).map(|_| 1)),
            Feed::Types => numbers.extend(tokens.types.iter().map(|kind| i64::from(*kind))),
            Feed::Positions => {
                let first = first_position as i64;
                numbers.extend(first..first + count);
            }
        }
        numbers.resize(end, 0);
    }
    numbers
}

/// Makes results of the output of a graph.
struct Head<'a> {
    model: &'a TextModel,
    tokenizer: &'a Texts,
    is_of_tokens: bool,
    mask: u32,
}

impl Head<'_> {
    fn read(
        &self,
        shape: &[usize],
        computed: &[f32],
        texts: &[&Prepared],
        length: usize,
    ) -> Computed {
        let width = match (shape, self.is_of_tokens) {
            ([rows, width], false) if *rows == texts.len() => *width,
            // A graph with one logit may leave its dimension out.
            ([rows], false) if *rows == texts.len() => 1,
            ([rows, tokens, width], true) if *rows == texts.len() && *tokens == length => *width,
            (shape, _) => {
                return Err(run_error(format!(
                    "the graph has computed an output of the shape {shape:?} from {} texts of {length} \
                     tokens",
                    texts.len()
                )));
            }
        };
        let classes = match self.model.task {
            PoolingTask::Score => 1,
            PoolingTask::Classify | PoolingTask::ClassifyTokens => self.model.labels.len(),
            PoolingTask::Embed | PoolingTask::FillMask => width.max(1),
        };
        if width != classes {
            return Err(run_error(format!(
                "the graph has computed {width} numbers for each text or token, and the model has {classes} \
                 classes ('id2label' of config.json)"
            )));
        }
        let row = if self.is_of_tokens { length * width } else { width };
        let rows = computed.chunks_exact(row.max(1)).zip(texts);
        Ok(rows.map(|(values, prepared)| self.value(values, prepared, width)).collect())
    }

    /// Makes the result for a text.
    fn value(
        &self,
        values: &[f32],
        prepared: &Prepared,
        width: usize,
    ) -> Result<Value, InferError> {
        let own = values.get(..prepared.tokens.ids.len() * width).unwrap_or(values);
        match self.model.task {
            PoolingTask::Embed => {
                let mut vector = Vec::with_capacity(width);
                if self.is_of_tokens {
                    let vectors = TokenVectors { values: own, width };
                    self.model.pooling.iter().for_each(|way| vectors.pool(*way, &mut vector));
                } else {
                    vector.extend(values);
                }
                if prepared.normalize {
                    normalize(&mut vector);
                }
                Ok(Value::Numbers(vector))
            }
            PoolingTask::Score | PoolingTask::Classify => {
                let mut numbers = values.to_vec();
                if !prepared.raw_scores {
                    heads::activate(&mut numbers, self.model.activation);
                }
                Ok(Value::Numbers(numbers))
            }
            PoolingTask::ClassifyTokens => {
                let text = prepared.text.as_str();
                heads::entities(own, text, &prepared.tokens, self.model, self.tokenizer)
                    .map(Value::Text)
            }
            PoolingTask::FillMask => {
                let count = prepared.predictions;
                heads::predictions(own, &prepared.tokens, self.mask, count, self.tokenizer)
                    .map(Value::Text)
            }
        }
    }
}
