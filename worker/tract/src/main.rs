//! The backend `tract`: ONNX models in pure Rust, for machines without the library of ONNX Runtime.
//! CPU only, one thread. It is a separate program because tract takes twelve minutes of processor time to
//! compile.
//!
//! A model whose variable dimensions have names is optimized once, with symbols for them. A model
//! that tract cannot optimize that way is optimized once for each combination of input shapes. A
//! model that tract cannot run at all is refused at its load: one with an operator that tract does
//! not have, or that it can optimize neither with symbols nor with [`TRIAL_SIZES`].

mod text_graph;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use pharos::error::InferError;
use pharos::model::onnx;
use pharos::tensor::{DataType, push_bytes_element};
use pharos_backend::onnx::{model_file, texts};
use pharos_backend::{Backend, Batch, Context, Input, Outputs, for_numbers, load_error, run_error};
use pharos_worker::Worker;
use tract_onnx::pb::NodeProto;
use tract_onnx::prelude::{
    DatumType, Framework, InferenceFact, InferenceModel, InferenceModelExt, IntoRunnable, TDim,
    TValue, TVec, Tensor, TractResult, TypedRunnableModel,
};
use tract_onnx::tract_core::internal::{bail, ensure};
use tract_onnx::tract_hir::infer::Factoid;

/// Maximum number of plans for different input shapes; when one more is needed, all are dropped.
const MAX_PLANS: usize = 64;

/// The sizes of variable dimensions for which a model is optimized at its load if tract cannot
/// optimize it with symbols. Any of them proves that tract can run the model: one item, tokens, and
/// images of usual sizes.
const TRIAL_SIZES: [i64; 5] = [1, 2, 16, 64, 224];

/// Advice for models that tract cannot run.
const REMEDY: &str = "ONNX Runtime may run it: `pip install onnxruntime` for the `python3` on the \
                      server's PATH, or --onnxruntime-library, and no `backend: \"tract\"` in the \
                      configuration";

type Plan = Arc<TypedRunnableModel>;
type Shapes = Vec<Vec<usize>>;

struct Tract {
    plans: Plans,
    /// For each input of the graph, the position in the configuration.
    inputs: Vec<usize>,
    /// For each output of the graph, the position in the configuration; `None` if it is not
    /// configured.
    outputs: Vec<Option<(usize, DataType)>>,
}

/// A model with what tract has optimized of it.
struct Plans {
    model: InferenceModel,
    /// One plan for all shapes, if tract could create it.
    symbolic: Option<Plan>,
    of_shapes: HashMap<Shapes, Plan>,
}

fn main() -> ExitCode {
    let text = |context: &Context<'_>| pharos_text::on(context, text_graph::open);
    Worker::new().backend("tract", create).backend("text", text).run()
}

/// Loads the model's file.
fn create(context: &Context<'_>) -> Result<Box<dyn Backend>, InferError> {
    let path = model_file(context)?;
    let unusable = |error: &dyn std::fmt::Display| {
        load_error(format!("tract cannot load '{}': {error}", path.display()))
    };
    if onnx::is_ort_format(&context.config.default_model_filename) {
        return Err(unusable(&format!("only ONNX Runtime reads its own format; {REMEDY}")));
    }
    let mut model = readable(&path).map_err(|error| unusable(&error))?;
    let names = graph_names(&model).map_err(|error| unusable(&error))?;
    let position = |name| {
        (0..context.config.backend_inputs()).find(|at| context.config.input_name(*at) == Some(name))
    };
    let inputs = names
        .0
        .iter()
        .map(|name| position(name).ok_or(name))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|name| unusable(&format!("its input '{name}' is not in the configuration")))?;
    let outputs: Vec<_> = names.1.iter().map(|name| configured_output(context, name)).collect();
    for (output, _) in context.config.backend_outputs() {
        if !names.1.iter().any(|name| name == output) {
            return Err(unusable(&format!(
                "it has no output '{output}'; it has {}",
                names.1.join(", ")
            )));
        }
    }
    // Output facts in the file can be wrong; tract derives them itself.
    for output in 0..model.outputs.len() {
        model = model
            .with_output_fact(output, InferenceFact::default())
            .map_err(|error| unusable(&error))?;
    }
    let plans = Plans::new(model).map_err(|error| unusable(&error))?;
    Ok(Box::new(Tract { plans, inputs, outputs }))
}

/// Reads the model's file, whose operators tract has.
fn readable(path: &Path) -> Result<InferenceModel, String> {
    let unusable = |error| format!("{error:#}; {REMEDY}");
    let model = read(path).map_err(unusable)?;
    let missing = missing_operators(&model).map_err(unusable)?;
    match missing.as_slice() {
        [] => Ok(model),
        names => Err(format!("it does not have the operators {}; {REMEDY}", names.join(", "))),
    }
}

/// Reads the model's file.
///
/// # Errors
/// tract cannot read it, or would compute it wrong.
fn read(path: &Path) -> TractResult<InferenceModel> {
    let onnx = tract_onnx::onnx();
    let file = onnx.proto_model_for_path(path)?;
    if let Some(nodes) = file.graph.as_ref().map(|graph| &graph.node)
        && let Some(wrong) = nodes.iter().find_map(computed_wrong)
    {
        bail!("it computes {wrong} wrong");
    }
    let folder = path.parent().and_then(Path::to_str);
    let parsed = onnx.parse(&file, folder)?;
    ensure!(
        parsed.unresolved_inputs.is_empty(),
        "the graph lacks {}",
        parsed.unresolved_inputs.join(", ")
    );
    Ok(parsed.model)
}

/// Returns the operator and attribute of a node that tract computes wrong, by the tests of ONNX's
/// operators.
fn computed_wrong(node: &NodeProto) -> Option<String> {
    let (attribute, value) = match node.op_type.as_str() {
        "RNN" | "GRU" | "LSTM" => ("direction", "reverse"),
        "SpaceToDepth" => ("mode", "CRD"),
        _ => return None,
    };
    let found = node.attribute.iter().find(|own| own.name == attribute)?;
    let is_wrong = found.s == value.as_bytes();
    is_wrong.then(|| format!("{} with {attribute} '{value}'", node.op_type))
}

/// Returns the operators that tract does not have, among those on which the outputs depend: sorted,
/// each once.
fn missing_operators(model: &InferenceModel) -> TractResult<Vec<String>> {
    let mut missing = BTreeSet::new();
    for node in model.eval_order()? {
        let name = model.node(node).op.name();
        // tract's name of a node whose operator it does not know, which it keeps until the graph is
        // optimized.
        if let Some(operator) =
            name.strip_prefix("Unimplemented(").and_then(|rest| rest.strip_suffix(')'))
        {
            missing.insert(operator.to_owned());
        }
    }
    Ok(missing.into_iter().collect())
}

/// Optimizes the model with one of [`TRIAL_SIZES`] in place of each variable dimension. A model
/// with an input of unknown rank is not tried.
///
/// # Errors
/// tract can optimize the model with none of the sizes: the reason for the first size.
fn try_sizes(model: &InferenceModel) -> TractResult<()> {
    let mut failure = None;
    for size in TRIAL_SIZES {
        let Some(sized) = with_size(model, size)? else { return Ok(()) };
        match sized.into_optimized().and_then(IntoRunnable::into_runnable) {
            Ok(_) => return Ok(()),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Returns the model with this size in place of each variable dimension of its inputs; `None` if
/// the rank of an input is unknown.
fn with_size(model: &InferenceModel, size: i64) -> TractResult<Option<InferenceModel>> {
    let mut sized = model.clone();
    for index in 0..model.inputs.len() {
        let fact = model.input_fact(index)?;
        if fact.shape.is_open() {
            return Ok(None);
        }
        let dims = fact
            .shape
            .dims()
            .map(|dim| dim.concretize().and_then(|dim| dim.to_i64().ok()).unwrap_or(size));
        let shape: Vec<TDim> = dims.map(TDim::from).collect();
        let fact = fact.clone().with_shape(shape);
        sized = sized.with_input_fact(index, fact)?;
    }
    Ok(Some(sized))
}

fn configured_output(context: &Context<'_>, name: &str) -> Option<(usize, DataType)> {
    let mut outputs = context.config.backend_outputs().enumerate();
    outputs
        .find_map(|(position, (output, datatype))| (output == name).then_some((position, datatype)))
}

fn graph_names(model: &InferenceModel) -> TractResult<(Vec<String>, Vec<String>)> {
    let name = |outlet: &tract_onnx::prelude::OutletId| {
        let label = model.outlet_label(*outlet).map(str::to_owned);
        label.unwrap_or_else(|| model.node(outlet.node).name.clone())
    };
    Ok((
        model.input_outlets()?.iter().map(name).collect(),
        model.output_outlets()?.iter().map(name).collect(),
    ))
}

impl Backend for Tract {
    fn engine(&self) -> String {
        "tract 0.23".to_owned()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let ordered: Vec<&Input<'_>> = self
            .inputs
            .iter()
            .map(|position| {
                let input = batch.inputs.iter().find(|input| input.index == *position);
                input.ok_or_else(|| run_error("tract cannot run a model with a missing input"))
            })
            .collect::<Result<_, _>>()?;
        let mut tensors: TVec<TValue> = TVec::new();
        for input in ordered {
            tensors.push(to_tensor(input, batch, outputs)?.into());
        }
        let plan =
            self.plans.plan(&tensors).map_err(|error| run_error(format!("tract: {error:#}")))?;
        outputs.inputs_ready();
        let results = plan.run(tensors).map_err(|error| run_error(format!("tract: {error:#}")))?;
        outputs.computed();
        for (result, configured) in results.iter().zip(&self.outputs) {
            if let Some((position, datatype)) = configured
                && batch.wants(*position)
            {
                from_tensor(result, *position, *datatype, outputs)?;
            }
        }
        // The results have the order of the graph.
        outputs.sort();
        Ok(())
    }
}

impl Plans {
    /// Optimizes a model with symbols for its variable dimensions, or finds that it can be optimized
    /// for some sizes.
    ///
    /// # Errors
    /// tract can do neither: the reason and a remedy.
    fn new(model: InferenceModel) -> Result<Self, String> {
        let symbolic = model.clone().into_optimized().and_then(IntoRunnable::into_runnable).ok();
        if symbolic.is_none() {
            try_sizes(&model).map_err(|error| format!("{error:#}; {REMEDY}"))?;
        }
        Ok(Self { model, symbolic, of_shapes: HashMap::new() })
    }

    /// Returns the plan for these inputs.
    fn plan(&mut self, inputs: &[TValue]) -> TractResult<Plan> {
        if let Some(plan) = &self.symbolic {
            return Ok(plan.clone());
        }
        let shapes: Shapes = inputs.iter().map(|input| input.shape().to_vec()).collect();
        if let Some(plan) = self.of_shapes.get(&shapes) {
            return Ok(plan.clone());
        }
        let mut model = self.model.clone();
        for (index, input) in inputs.iter().enumerate() {
            model = model.with_input_fact(
                index,
                InferenceFact::dt_shape(input.datum_type(), input.shape()),
            )?;
        }
        let plan = model.into_optimized()?.into_runnable()?;
        if self.of_shapes.len() >= MAX_PLANS {
            self.of_shapes.clear();
        }
        self.of_shapes.insert(shapes, plan.clone());
        Ok(plan)
    }
}

fn to_tensor(
    input: &Input<'_>,
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<Tensor, InferError> {
    let shape: Vec<usize> =
        input.shape.iter().map(|dim| usize::try_from(*dim).unwrap_or(0)).collect();
    let tensor = for_numbers!(input.datatype, Number => {
        let values: Vec<Number> = input.data.as_chunks().0.iter().map(|bytes| Number::from_le_bytes(*bytes)).collect();
        Tensor::from_shape(&shape, &values)
    }, otherwise match input.datatype {
        DataType::Bool => {
            let values: Vec<bool> = input.data.iter().map(|byte| *byte != 0).collect();
            Tensor::from_shape(&shape, &values)
        }
        DataType::Bytes => return text_tensor(input, &shape, batch, outputs),
        other => return Err(run_error(format!("tract does not support {other} inputs"))),
    });
    tensor.map_err(|error| run_error(format!("input '{}': {error:#}", input.name)))
}

fn text_tensor(
    input: &Input<'_>,
    shape: &[usize],
    batch: &Batch<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<Tensor, InferError> {
    let texts = texts(input, batch, outputs)?;
    let array = tract_onnx::prelude::tract_ndarray::ArrayD::from_shape_vec(shape, texts);
    array.map(Tensor::from).map_err(|error| run_error(format!("input '{}': {error}", input.name)))
}

fn from_tensor(
    tensor: &Tensor,
    position: usize,
    datatype: DataType,
    outputs: &mut Outputs<'_>,
) -> Result<(), InferError> {
    let shape: Vec<i64> =
        tensor.shape().iter().map(|dim| i64::try_from(*dim).unwrap_or(0)).collect();
    let unusable = |error: &dyn std::fmt::Display| {
        run_error(format!("output {position} as {datatype}: {error:#}"))
    };
    if tensor.datum_type() == DatumType::TDim {
        let tensor = tensor.cast_to::<i64>().map_err(|error| unusable(&error))?;
        return from_tensor(&tensor, position, datatype, outputs);
    }
    let view = tensor.try_as_plain_ram().map_err(|error| unusable(&error))?;
    if datatype == DataType::Bytes {
        let mut data = Vec::new();
        for text in view.as_slice::<String>().map_err(|error| unusable(&error))? {
            push_bytes_element(&mut data, text.as_bytes());
        }
        outputs.allocate(position, datatype, &shape, data.len())?.copy_from_slice(&data);
        return Ok(());
    }
    let out = outputs.allocate_fixed(position, datatype, &shape)?;
    for_numbers!(datatype, Number => {
        let values = view.as_slice::<Number>().map_err(|error| unusable(&error))?;
        for (bytes, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
            *bytes = value.to_le_bytes();
        }
    }, otherwise match datatype {
        DataType::Bool => {
            let values = view.as_slice::<bool>().map_err(|error| unusable(&error))?;
            for (byte, value) in out.iter_mut().zip(values) {
                *byte = u8::from(*value);
            }
        }
        other => return Err(run_error(format!("tract does not support {other} outputs"))),
    });
    Ok(())
}
