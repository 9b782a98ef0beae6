//! What the files of text models mean, and what is wrong with others.

use super::*;

/// Returns files with these contents; those without a content are only there.
fn files(all: &[(&str, &str)]) -> TextFiles {
    let mut files = TextFiles::default();
    for (name, text) in all {
        files.names.push((*name).to_owned());
        if TextFiles::is_read(name) {
            files.contents.insert((*name).to_owned(), (*text).to_owned());
        }
    }
    files
}

const BERT: &str =
    r#"{"architectures":["BertModel"],"model_type":"bert","max_position_embeddings":512}"#;
const MINILM: [(&str, &str); 7] = [
    (CONFIG, BERT),
    (TOKENIZER, ""),
    ("onnx/model.onnx", ""),
    (
        MODULES,
        r#"[{"idx":0,"path":"","type":"sentence_transformers.models.Transformer"},
            {"idx":1,"path":"1_Pooling","type":"sentence_transformers.models.Pooling"},
            {"idx":2,"path":"2_Normalize","type":"sentence_transformers.models.Normalize"}]"#,
    ),
    (
        "1_Pooling/config.json",
        r#"{"pooling_mode_mean_tokens":true,"pooling_mode_cls_token":false}"#,
    ),
    (SENTENCE_BERT, r#"{"max_seq_length":256}"#),
    (SENTENCE_TRANSFORMER, r#"{"prompts":{"query":"query: "},"default_prompt_name":null}"#),
];

fn of(all: &[(&str, &str)], parameters: &[(&str, &str)]) -> Result<TextModel, String> {
    let parameter = |name: &str| {
        let found = parameters.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    TextModel::of(&files(all), parameter("file").as_deref().unwrap_or_default(), &parameter)
}

/// Returns the files of a model with this configuration and a graph.
fn with_config(config: &str) -> [(&str, &str); 3] {
    [(CONFIG, config), (TOKENIZER, ""), ("model.onnx", "")]
}

#[test]
fn a_model_of_sentence_transformers() {
    let model = of(&MINILM, &[]).unwrap();
    assert_eq!(model.task, PoolingTask::Embed);
    assert_eq!(model.graph, "onnx/model.onnx");
    assert_eq!(model.max_tokens, 256);
    assert_eq!(model.pooling, [TextPooling::Mean]);
    assert!(model.normalize && !model.needs_whole_graph && model.default_prompt.is_none());
    assert_eq!(model.prompts["query"], "query: ");
    let model = of(&MINILM, &[("pooling", "cls"), ("normalize", "false"), ("context_length", "9")]);
    let model = model.unwrap();
    assert_eq!(
        (model.pooling, model.normalize, model.max_tokens),
        (vec![TextPooling::Cls], false, 9)
    );
    let mut dense = MINILM.to_vec();
    dense[3].1 = r#"[{"path":"2_Dense","type":"sentence_transformers.models.Dense"}]"#;
    assert!(of(&dense, &[]).unwrap().needs_whole_graph);
    // A model that was trained with another head.
    let mut masked = MINILM.to_vec();
    masked[0].1 = r#"{"architectures":["MPNetForMaskedLM"],"model_type":"mpnet","max_position_embeddings":514,"pad_token_id":1}"#;
    masked[5].1 = "{}";
    let model = of(&masked, &[]).unwrap();
    assert_eq!((model.task, model.max_tokens), (PoolingTask::Embed, 512));
}

#[test]
fn the_task_comes_from_the_architecture() {
    let two = r#""id2label":{"0":"NO","1":"YES"}"#;
    for (config, task, activation) in [
        (
            r#""architectures":["BertForSequenceClassification"],"id2label":{"0":"L"}"#,
            PoolingTask::Score,
            Activation::Sigmoid,
        ),
        (
            r#""architectures":["BertForSequenceClassification"],"id2label":{"0":"L"},
            "sbert_ce_default_activation_function":"torch.nn.modules.linear.Identity""#,
            PoolingTask::Score,
            Activation::Identity,
        ),
        (
            r#""architectures":["BertForSequenceClassification"],"id2label":{"0":"L"},
            "sentence_transformers":{"activation_fn":"torch.nn.modules.activation.Sigmoid"}"#,
            PoolingTask::Score,
            Activation::Sigmoid,
        ),
        (
            &format!(r#""architectures":["XForSequenceClassification"],{two}"#),
            PoolingTask::Classify,
            Activation::Softmax,
        ),
        (
            &format!(
                r#""architectures":["XForSequenceClassification"],"problem_type":"multi_label_classification",{two}"#
            ),
            PoolingTask::Classify,
            Activation::Sigmoid,
        ),
        (
            &format!(r#""architectures":["XForTokenClassification"],{two}"#),
            PoolingTask::ClassifyTokens,
            Activation::Softmax,
        ),
        (r#""architectures":["RobertaForMaskedLM"]"#, PoolingTask::FillMask, Activation::Softmax),
        (r#""architectures":["XLMRobertaModel"]"#, PoolingTask::Embed, Activation::Softmax),
    ] {
        let config = format!("{{{config}}}");
        let model = of(&with_config(&config), &[]).unwrap();
        assert_eq!((model.task, model.activation), (task, activation), "{config}");
    }
    let labels =
        of(&with_config(&format!(r#"{{"architectures":["XForTokenClassification"],{two}}}"#)), &[]);
    assert_eq!(labels.unwrap().labels, ["NO", "YES"]);
    let own = [("task", "classify"), ("labels", r#"["a","b"]"#)];
    let model = of(&with_config("{}"), &own).unwrap();
    assert_eq!(
        (model.task, model.labels),
        (PoolingTask::Classify, vec!["a".to_owned(), "b".to_owned()])
    );
}

#[test]
fn errors_say_what_is_allowed() {
    let bert = with_config(BERT);
    let without =
        |name: &str| bert.iter().filter(|(known, _)| *known != name).copied().collect::<Vec<_>>();
    for (files, parameters, expected) in [
        (without(TOKENIZER), &[][..], "needs the file 'tokenizer.json'"),
        (without(CONFIG), &[], "needs the file 'config.json'"),
        (
            without("model.onnx"),
            &[],
            "`optimum-cli export onnx --model DIRECTORY --task feature-extraction DIRECTORY`",
        ),
        (with_config("[]").to_vec(), &[], "'config.json' is not a JSON object"),
        (with_config("{").to_vec(), &[], "'config.json' is not JSON"),
        (
            with_config(r#"{"architectures":["T5ForConditionalGeneration"]}"#).to_vec(),
            &[],
            "[T5ForConditionalGeneration], which name no task: set the parameter 'task' to one of embed, score, \
             classify, token_classify, fill_mask",
        ),
        (
            with_config(r#"{"architectures":["BertModel","BertForMaskedLM"]}"#).to_vec(),
            &[],
            "name more than one task",
        ),
        (bert.to_vec(), &[("task", "x")], "'task' is 'x'; allowed are embed"),
        (bert.to_vec(), &[("pooling", "x")], "'pooling' is 'x'; allowed are cls, max, mean"),
        (bert.to_vec(), &[("normalize", "1")], "allowed are true and false"),
        (bert.to_vec(), &[("dtype", "x")], "allowed are fp32, fp16, int8"),
        (
            bert.to_vec(),
            &[("dtype", "fp16")],
            "none of the graphs [model.onnx] is of the type 'fp16'",
        ),
        (
            bert.to_vec(),
            &[("file", "m.onnx")],
            "the file 'm.onnx' ('default_model_filename') does not exist",
        ),
        (bert.to_vec(), &[("context_length", "0")], "allowed is an integer above 0"),
        (bert.to_vec(), &[("labels", "a")], "must be a JSON list of strings"),
        (
            with_config(r#"{"architectures":["X"],"id2label":{"1":"a"}}"#).to_vec(),
            &[],
            "its keys must be the numbers from 0 to 0",
        ),
        (
            [&bert[..], &[(MODULES, r#"[{"path":"1_Pooling","type":"x.Pooling"}]"#)]].concat(),
            &[],
            "'modules.json' needs the file '1_Pooling/config.json'",
        ),
        (
            [
                &bert[..],
                &[
                    (MODULES, r#"[{"path":"p","type":"x.Pooling"}]"#),
                    (
                        "p/config.json",
                        r#"{"pooling_mode_mean_tokens":true,"include_prompt":false}"#,
                    ),
                ],
            ]
            .concat(),
            &[],
            "'include_prompt': false, which is not available here",
        ),
    ] {
        let error = of(&files, parameters).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn one_of_several_graphs() {
    let with = |graphs: &[&'static str], parameters: &[(&str, &str)]| {
        let mut files = vec![(CONFIG, BERT), (TOKENIZER, "")];
        files.extend(graphs.iter().map(|graph| (*graph, "")));
        of(&files, parameters).map(|model| model.graph)
    };
    let all = [
        "onnx/model.onnx",
        "onnx/model_O4.onnx",
        "onnx/model_fp16.onnx",
        "onnx/model_qint8_avx512.onnx",
        "onnx/model_qint8_arm64.onnx",
        "onnx/model_uint8.onnx",
    ];
    let dtype = |value: &'static str| [("dtype", value)];
    assert_eq!(with(&all, &[]).unwrap(), "onnx/model.onnx");
    assert_eq!(with(&all, &dtype("uint8")).unwrap(), "onnx/model_uint8.onnx");
    for several in ["int8", "fp16"] {
        assert!(
            with(&all, &dtype(several)).unwrap_err().starts_with("more than one of the graphs [")
        );
    }
    assert_eq!(
        with(&all, &[("file", "onnx/model_qint8_arm64.onnx")]).unwrap(),
        "onnx/model_qint8_arm64.onnx"
    );
    assert_eq!(with(&["model.onnx", "onnx/model.onnx"], &[]).unwrap(), "model.onnx");
    assert_eq!(with(&["encoder.onnx"], &[]).unwrap(), "encoder.onnx");
    assert!(
        with(&["a.onnx", "b.onnx"], &[])
            .unwrap_err()
            .starts_with("none of the graphs [a.onnx, b.onnx]")
    );
}

#[test]
fn lengths_of_texts() {
    let most = |config: &str, tokenizer: &'static str| {
        let config = format!(r#"{{"architectures":["BertModel"],{config}}}"#);
        let files = [
            (CONFIG, config.as_str()),
            (TOKENIZER, ""),
            ("m.onnx", ""),
            (TOKENIZER_CONFIG, tokenizer),
        ];
        of(&files, &[]).unwrap().max_tokens
    };
    assert_eq!(most(r#""max_position_embeddings":512"#, r#"{"model_max_length":128}"#), 128);
    assert_eq!(
        most(
            r#""max_position_embeddings":512"#,
            r#"{"model_max_length":1000000000000000019884624838656}"#
        ),
        512
    );
    assert_eq!(most(r#""max_position_embeddings":514,"model_type":"xlm-roberta""#, "{}"), 512);
    assert_eq!(most(r#""max_position_embeddings":514,"position_biased_input":false"#, "{}"), 512);
    assert_eq!(most(r#""x":1"#, "{}"), 512);
}

#[test]
fn names_that_make_a_text_model() {
    assert!(TextFiles::are_in(["config.json", "tokenizer.json", "onnx"]));
    assert!(TextFiles::are_in(["config.json", "tokenizer.json", "model.onnx", "x"]));
    assert!(!TextFiles::are_in(["config.json", "tokenizer.json", "model.safetensors"]));
    assert!(!TextFiles::are_in(["config.json", "model.onnx"]));
}
