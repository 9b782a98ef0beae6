//! The text format and its JSON form: accepted text, and the positions of errors.

use proptest::prelude::*;

use super::super::{ConfigError, Draft, proto};
use super::{IDENTITY, SIMPLE};

fn parsed(source: &str) -> proto::ModelConfig {
    Draft::from_text(source, "config.pbtxt").unwrap().proto
}

#[test]
fn all_notations_are_equivalent() {
    let plain = parsed(
        r#"name: "m" max_batch_size: 4
           input { name: "a" data_type: TYPE_FP32 dims: 3 dims: -1 }
           parameters { key: "k" value { string_value: "one two" } }
           metric_tags { key: "x" value: "y" }
           response_cache { enable: true }"#,
    );
    for same in [
        r#"name:"m";max_batch_size:4,input:[{name:"a",data_type:TYPE_FP32,dims:[3,-1]}];
           parameters:{key:"k",value:{string_value:"one two"}} metric_tags:{key:"x" value:"y"} response_cache:{enable:True}"#,
        r#"# comments # in comments
           name: 'm' # and after values
           max_batch_size: 0x4
           input [ < name: "a" data_type: 11 dims: [ 3, -1 ] > ]
           parameters [ { key: "k" value: { string_value: "one" ' ' "two" } } ]
           metric_tags { value: "y" key: "x" } response_cache < enable: 1 >"#,
        "\u{feff}name: \"\\x6d\"\r\nmax_batch_size: 04\r\ninput: { dims: [] dims: [3] dims: [-1] \
         data_type: TYPE_FP32 name: \"a\" }\r\nparameters { value { string_value: \"one \\164wo\" \
         } key: \"k\" } metric_tags { key: \"x\" value: \"z\" } metric_tags { key: \"x\" value: \
         \"y\" } response_cache { enable: t }",
    ] {
        assert_eq!(parsed(same), plain, "{same}");
    }
}

#[test]
fn floats_and_groups_are_read() {
    let config = parsed(
        "sequence_batching { direct { minimum_slot_utilization: .5 } control_input [ { name: 'S' \
         control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, -1.5e1f ] } ] } ] } \
         model_metrics { metric_control { metric_identifier { family: 'f' } histogram_options { \
         buckets: [ 1, inf ] } } }",
    );
    let Some(proto::model_config::SchedulingChoice::SequenceBatching(sequence)) =
        config.scheduling_choice
    else {
        panic!("no sequence batching")
    };
    assert_eq!(sequence.control_input[0].control[0].fp32_false_true, [0.0, -15.0]);
    let direct = proto::model_sequence_batching::StrategyDirect {
        minimum_slot_utilization: 0.5,
        ..Default::default()
    };
    assert_eq!(
        sequence.strategy_choice,
        Some(proto::model_sequence_batching::StrategyChoice::Direct(direct))
    );
    assert!(format!("{:?}", config.model_metrics).contains("[1.0, inf]"));
}

#[test]
fn errors_have_position_cause_and_allowed_values() {
    let fields = "allowed: backend, batch_input, batch_output, cc_model_filenames, \
                  default_model_filename, dynamic_batching, ensemble_scheduling, input, \
                  instance_group, max_batch_size, metric_tags, model_metrics, model_operations, \
                  model_repository_agents, model_transaction_policy, model_warmup, name, \
                  optimization, output, parameters, platform, response_cache, runtime, \
                  sequence_batching, version_policy";
    for (source, expected) in [
        (
            "name: 'm'\n\n    max_batchsize: 3",
            &*format!(
                "3:5: 'max_batchsize' is not a field of ModelConfig; did you mean \
                 'max_batch_size'? {fields}"
            ),
        ),
        ("zzzzzzzzz: 3", &*format!("1:1: 'zzzzzzzzz' is not a field of ModelConfig; {fields}")),
        (
            "instance_group [ { kind: KIND_CPUS } ]",
            "1:26: 'KIND_CPUS' is not a value of ModelInstanceGroup.Kind; did you mean \
             'KIND_CPU'? allowed: KIND_AUTO, KIND_CPU, KIND_GPU, KIND_MODEL",
        ),
        (
            "input { format: 7 }",
            "1:17: '7' is not a value of ModelInput.Format; allowed: FORMAT_NCHW, FORMAT_NHWC, \
             FORMAT_NONE",
        ),
        (
            "max_batch_size: 3000000000",
            "1:17: 3000000000 is out of range for 'max_batch_size' (int32: -2147483648 to \
             2147483647)",
        ),
        (
            "model_warmup { count: -1 }",
            "1:23: -1 is out of range for 'count' (uint32: 0 to 4294967295)",
        ),
        (
            "max_batch_size: 'x'",
            "1:17: expected an integer for 'max_batch_size', found the string \"x\"",
        ),
        ("max_batch_size: 1.5", "1:17: expected an integer for 'max_batch_size', found '1.5'"),
        ("max_batch_size: 08", "1:17: expected an integer for 'max_batch_size', found '08'"),
        ("max_batch_size 8", "1:16: expected ':' after 'max_batch_size', found '8'"),
        ("max_batch_size: [8]", "1:17: 'max_batch_size' takes one value, not a list"),
        (
            "max_batch_size: 8\nmax_batch_size: 8",
            "2:1: 'max_batch_size' is given twice; it may be given once",
        ),
        (
            "dynamic_batching { }\nsequence_batching { }",
            "2:1: 'dynamic_batching' and 'sequence_batching' exclude each other: only one \
             'scheduling_choice' may be given",
        ),
        ("name: 3", "1:7: expected a quoted string for 'name', found '3'"),
        ("name: '\\xff'", "1:7: this string is not valid UTF-8"),
        ("name: 'm", "1:7: this string is not closed with ' on its line"),
        ("input { dims: [ 1 2 ] }", "1:19: expected ',' or ']', found '2'"),
        ("input {\n  name: 'a'\n", "3:1: expected a field name or '}', found the end of the file"),
        ("input: 3", "1:8: expected '{' to open 'input', found '3'"),
        (
            "response_cache { enable: maybe }",
            "1:26: expected true or false for 'enable', found 'maybe'",
        ),
        ("}", "1:1: expected a field name, found '}'"),
        ("[x.y/inference.ModelConfig] { }", "1:1: expected a field name, found '['"),
        ("name: 'é' §", "1:11: unexpected character '§'"),
    ] {
        let error = Draft::from_text(source, "config.pbtxt").unwrap_err().to_string();
        assert_eq!(error, format!("config.pbtxt:{expected}"), "{source}");
    }
}

#[test]
fn json_accepts_both_naming_styles() {
    let json = r#"{"name":"m","maxBatchSize":"16","input":[{"name":"a","data_type":"TYPE_INT8","dims":["4",-1]}]}"#;
    let text =
        r#"name: "m" max_batch_size: 16 input { name: "a" data_type: TYPE_INT8 dims: [4, -1] }"#;
    assert_eq!(Draft::from_json(json).unwrap().proto, parsed(text));
    for (json, expected) in [
        (
            "{\"nam\":1}",
            "model configuration JSON:1:2: 'nam' is not a field of ModelConfig; did you mean \
             'name'?",
        ),
        ("{} x", "model configuration JSON:1:4: expected the end of the configuration, found 'x'"),
        ("", "model configuration JSON:1:1: expected '{', found the end of the configuration"),
    ] {
        let error = Draft::from_json(json).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{json}: {error}");
    }
}

#[test]
fn drafts_round_trip_through_protobuf() {
    let draft = Draft::from_text(SIMPLE, "config.pbtxt").unwrap();
    assert_eq!(Draft::decode(&draft.encode()).unwrap(), draft);
    assert!(Draft::decode(&[0xff]).is_err());
}

/// Parses a JSON object with these members.
fn json_with(more: &str) -> Result<Draft, ConfigError> {
    Draft::from_json(&format!("{{{more}}}"))
}

#[test]
fn json_is_as_lenient_as_in_protobuf() {
    for (json, text) in [
        ("max_batch_size:4, 'name':'m',", "max_batch_size: 4 name: 'm'"),
        ("input:[{dims:[4,-1,],},]", "input { dims: [4, -1] }"),
        ("input:{dims:7,dataType:'11'}", "input { dims: 7 data_type: TYPE_FP32 }"),
        ("'instance_group':[{kind:'kind-cpu'},null]", "instance_group { kind: KIND_CPU }"),
        ("maxBatchSize:\"4\",max_batch_size:5.0", "max_batch_size: 5"),
        (
            "max_batch_size:-4e0,optimization:{eager_batching:'true'}",
            "max_batch_size: -4 optimization { eager_batching: true }",
        ),
        (
            "optimization:{priority:2},optimization:{eager_batching:true}",
            "optimization { priority: PRIORITY_MIN eager_batching: true }",
        ),
        (
            "sequence_batching:null,model_warmup:null,metric_tags:null,dynamic_batching:{}",
            "dynamic_batching {}",
        ),
        (
            "metric_tags:{_a9:\"\\u0069\\x\\n\\ud83d\\ude00\\'\n\"}",
            "metric_tags { key: '_a9' value: 'ix\\n\u{1f600}\\'\\n' }",
        ),
        (
            "input:{dims:[9007199254740993,'-9223372036854775808']}",
            "input { dims: [9007199254740993, -9223372036854775808] }",
        ),
    ] {
        let read = json_with(json).map(|draft| draft.proto);
        assert_eq!(read, Ok(parsed(text)), "{json}");
    }
}

#[test]
fn json_that_protobuf_refuses_is_refused() {
    let cases = "max_batch_size:4,,|,max_batch_size:4|input:[,]|input:[{}{}]|max_batch_size:' \
                 4'|max_batch_size:'4.0'|max_batch_size:4.5|max_batch_size:0x4|max_batch_size:\
                 +4|max_batch_size:04|max_batch_size:3000000000|max_batch_size:\
                 true|max_batch_size:NaN|max_batch_size:[4]|max_batch_size \
                 4|max_batch_size=4|optimization:{eager_batching:1}|optimization:{eager_batching:\
                 True}|name:5|name:true|name:m|name:'m|name:'\\ud800'|name:'\\u12'|Max_Batch_Size:\
                 4|5:4|true:4|a-b:4|input:[{kind:FP32}]|input:{data_type:'FP32'}|input:{data_type:\
                 99}|input:[[{}]]|metric_tags:{a:'b',a:'c'}|dynamic_batching:{},sequence_batching:\
                 {}|dynamic_batching:7|metric_tags:[]|/* x */|name:|name:'a' \
                 name:'b'|max_batch_size:-|max_batch_size:1e|max_batch_size:1.e.2";
    for json in cases.split('|').chain(["}{", "{", "["]) {
        let error = json_with(json.trim()).expect_err(json).to_string();
        assert!(error.starts_with("model configuration JSON:1:"), "{json}: {error}");
    }
    for whole in ["", " ", "[]", "\"x\"", "null", "\u{feff}{}", "{", "{}{}"] {
        assert!(Draft::from_json(whole).is_err(), "{whole}");
    }
}

proptest! {
    #[test]
    fn arbitrary_text_does_not_panic(source in "\\PC*") {
        let _ = Draft::from_text(&source, "f");
        let _ = Draft::from_json(&source);
        let _ = json_with(&source);
    }

    #[test]
    fn almost_valid_json_does_not_panic(
        words in prop::collection::vec(
            prop::sample::select(vec![
                "input", "dims", ":", "{", "}", "[", "]", ",", "-", "1", "0x", "08", "1e", "\"a\"", "\"", "'", "\\", "\\u12", "\\ud83d",
                "null", "true", "'TYPE_INT32'", "data_type", "parameters", "string_value", "dynamic_batching", "latest", "\n", "é",
                "version_policy", "99999999999999999999999999999999999999999999", "metric_tags",
            ]),
            0..40,
        )
    ) {
        let _ = json_with(&words.join(" "));
        let _ = json_with(&words.concat());
    }

    #[test]
    fn json_round_trips(batch in 0..9i32, name in "\\PC{0,9}", dims in prop::collection::vec(any::<i64>(), 0..4)) {
        let input = serde_json::json!({"name": name, "dims": dims, "data_type": "TYPE_FP32"});
        let json = serde_json::json!({"max_batch_size": batch, "input": [input], "metric_tags": {&name: name}});
        let draft = Draft::from_json(&json.to_string()).unwrap();
        prop_assert_eq!(draft.proto.max_batch_size, batch);
        prop_assert_eq!(&draft.proto.input.first().unwrap().dims, &dims);
        prop_assert_eq!(draft.proto.metric_tags.get(&name), Some(&name));
    }

    #[test]
    fn almost_valid_text_does_not_panic(
        words in prop::collection::vec(
            prop::sample::select(vec![
                "input", "dims", ":", "{", "}", "[", "]", "<", ">", ",", ";", "-", "1", "0x", "08", "1e", ".5", "'a'", "\"",
                "'\\", "'\\u12'", "TYPE_INT32", "data_type", "parameters", "key", "value", "string_value", "dynamic_batching",
                "priority_queue_policy", "max_queue_size", "latest", "version_policy", "#", "\n", "enable", "response_cache",
                "99999999999999999999999999999999999999999999", "é",
            ]),
            0..40,
        )
    ) {
        let source = words.join(" ");
        let _ = Draft::from_text(&source, "f");
    }

    #[test]
    fn truncated_or_changed_configurations_do_not_panic(at in 0usize..600, byte in any::<u8>()) {
        let source = format!("{SIMPLE}{IDENTITY}");
        let mut bytes = source.into_bytes();
        if let Some(place) = bytes.get_mut(at) {
            *place = byte;
        }
        let _ = Draft::from_text(&String::from_utf8_lossy(&bytes), "f");
        bytes.truncate(at);
        let _ = Draft::from_text(&String::from_utf8_lossy(&bytes), "f");
    }
}
