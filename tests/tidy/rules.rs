//! The rules, as tables. To change a rule, change its row and state the reason in its last column.

/// The places that may name TorchServe.
const TORCHSERVE: &[&str] = &[
    // Its package, and its Python interface.
    "frontend/torchserve/",
    "worker/python/",
    // The executable connects its package to the engine, and has its variables.
    "frontend/src/",
    // The layouts of its log files.
    "frontend/telemetry/src/log",
    // Its forms of metrics.yaml, of metric log lines, and of lines that workers print.
    "src/metrics/catalog",
    "src/metrics/tslog.rs",
    "src/metrics/worker_lines.rs",
    // The backend `torchserve`, its archives and its request documents.
    "src/model/",
];

/// The folders of the crates inside `src/` that the core is built on.
pub(crate) const CRATES_OF_THE_CORE: &[&str] = &["src/base/", "src/metrics/"];

/// A package and its floors, from the highest down. A module may use lower floors, never higher
/// ones.
pub(crate) struct Layering {
    /// Its source folder.
    pub(crate) source: &'static str,
    pub(crate) floors: &'static [Floor],
}

/// Modules on the same floor.
pub(crate) struct Floor {
    pub(crate) modules: &'static [&'static str],
    /// Whether they may use each other.
    pub(crate) among_themselves: bool,
}

const fn independent(modules: &'static [&'static str]) -> Floor {
    Floor { modules, among_themselves: false }
}

const fn interdependent(modules: &'static [&'static str]) -> Floor {
    Floor { modules, among_themselves: true }
}

/// The floors of ARCHITECTURE.md. `lib.rs` and `main.rs` are above all floors and may use
/// everything.
pub(crate) const LAYERINGS: &[Layering] = &[
    Layering {
        source: "src/",
        floors: &[
            independent(&["fuzzing"]),
            // The interface between edges and engine, in types of the lower floors.
            independent(&["service"]),
            independent(&[
                "access",
                "scheduler",
                "repository",
                "supervisor",
                "trace",
                "cache",
                "ensemble",
                "load_report",
                "shared_memory",
                "wire",
                "yielding",
            ]),
            independent(&["model", "classification"]),
            interdependent(&[
                "infer",
                "request_trace",
                "tensor",
                "batch_split",
                "data",
                "region",
                "arena",
            ]),
            independent(&["printable"]),
        ],
    },
    Layering {
        source: "frontend/src/",
        floors: &[
            // The order of start and exit.
            independent(&["start"]),
            independent(&["commands"]),
            // Reads the command line into the settings of the packages below.
            independent(&["cli"]),
            independent(&["examples"]),
        ],
    },
    Layering {
        source: "frontend/engine/src/",
        floors: &[
            independent(&["engine", "simulation", "fuzzing"]),
            independent(&["loader"]),
            independent(&["serving"]),
            independent(&["supervisor", "ensemble"]),
            independent(&["worker_session"]),
            independent(&["calls"]),
            independent(&["scheduler"]),
            independent(&["process"]),
            independent(&["wire"]),
            independent(&[
                "cache",
                "launch",
                "load_progress",
                "memory",
                "model_memory",
                "onnxruntime",
                "sample_ring",
                "shared_memory",
                "store",
            ]),
        ],
    },
    Layering {
        source: "frontend/edge/src/",
        floors: &[
            independent(&["routing"]),
            independent(&["http_service"]),
            independent(&["call"]),
            independent(&["error_answer", "http_settings"]),
            // What differs between ports.
            independent(&["policy"]),
            independent(&[
                "access",
                "cors",
                "deadline",
                "load_report",
                "renderings",
                "request_log",
                "request_trace",
                "response_timing",
            ]),
            independent(&["headers", "query"]),
        ],
    },
    Layering {
        source: "frontend/telemetry/src/",
        floors: &[
            independent(&["statsd", "tslog"]),
            independent(&["metrics", "log", "system", "trace"]),
            independent(&["otlp"]),
        ],
    },
    Layering {
        source: "frontend/os/src/",
        floors: &[
            independent(&["children", "confinement", "control_groups", "worker_user"]),
            independent(&[
                "client",
                "descriptors",
                "directories",
                "event_loops",
                "file_watch",
                "background",
                "out_of_memory",
                "service_manager",
                "sockets",
                "tar_attributes",
                "threads",
                "variables",
            ]),
            independent(&["removal", "blocking", "scheduling"]),
            independent(&["clock"]),
        ],
    },
    Layering {
        source: "worker/src/",
        floors: &[
            independent(&["instance", "fork_server"]),
            independent(&["backend"]),
            independent(&["regions", "pinning", "sandbox", "state", "watch"]),
            independent(&["access", "descriptors", "command_line", "device", "resident_memory"]),
        ],
    },
    Layering {
        source: "worker/backend/src/",
        floors: &[
            independent(&["readiness", "onnx"]),
            independent(&["backend"]),
            independent(&["parts"]),
            independent(&["outputs", "batch", "calls"]),
            independent(&["responder"]),
            independent(&["session"]),
            independent(&["connection"]),
            independent(&["streams"]),
            independent(&["deferred"]),
            independent(&["reply", "blocks"]),
            independent(&["received", "metrics", "client_memory"]),
            independent(&["frames"]),
            independent(&["frame_stream"]),
            independent(&["spin"]),
            independent(&["aligned", "device", "error", "log", "memory", "clock"]),
        ],
    },
];

/// Paths that some files may not name.
pub(crate) struct Ban {
    /// The ban applies to files with one of these prefixes,
    pub(crate) within: &'static [&'static str],
    /// except those with one of these prefixes.
    pub(crate) except: &'static [&'static str],
    /// They may not name paths with one of these prefixes.
    pub(crate) paths: &'static [&'static str],
    /// Why, and what to do instead.
    pub(crate) advice: &'static str,
}

const DECIDERS: &[&str] = &["src/scheduler", "src/repository", "src/supervisor", "src/trace/"];
/// The packages of protocols that use nothing but a service. TorchServe's also manages workers.
const EDGES: &[&str] = &["frontend/edge/", "frontend/http/", "frontend/grpc/", "frontend/openai/"];
const ASYNC: &[&str] = &["tokio", "axum", "tonic", "hyper", "hyper_util", "tower", "h2", "futures"];
const PROTOBUF: &[&str] = &[
    "prost",
    "prost_types",
    "prost_reflect",
    "tonic",
    "tonic_prost",
    "tonic_health",
    "tonic_reflection",
    "crate::model::proto",
    "crate::otlp::proto",
    "pharos_base::otlp::proto",
    "pharos::model::proto",
    "pharos_grpc::proto",
];

/// The banned paths.
pub(crate) const BANS: &[Ban] = &[
    Ban {
        within: &["src/"],
        except: &[],
        paths: &[
            "std::net",
            "std::os::unix::net",
            "std::thread",
            "std::process",
            "std::time::Instant",
            "std::time::SystemTime",
        ],
        advice: "the core has no sockets, threads, processes or clocks: let the caller pass bytes \
                 and the time in",
    },
    Ban {
        within: &["src/", "worker/"],
        except: &[],
        paths: ASYNC,
        advice: "the core and the worker are synchronous: the core decides, frontend/ performs it",
    },
    Ban {
        within: &["worker/python/", "examples/backend_rust/", "tests/backends/"],
        except: &[],
        paths: &["pharos_backend::runtime"],
        advice: "backends use the public interface of pharos_backend; its module `runtime` is for \
                 pharos-worker",
    },
    Ban {
        within: DECIDERS,
        except: &[],
        paths: &[
            "crate::tensor",
            "crate::infer",
            "crate::wire",
            "crate::metrics",
            "crate::shm",
            "crate::arena",
        ],
        advice: "deciders use ids, model and timeline, never payloads or counters: the driver in \
                 frontend/engine has those",
    },
    Ban {
        within: &["src/metrics/exposition", "src/metrics/otlp"],
        except: &[],
        paths: &[
            "crate::alias",
            "crate::builtin",
            "crate::counts",
            "crate::durations",
            "crate::series",
            "crate::source",
        ],
        advice: "a view uses the module `readings`, neither names of metrics nor cells",
    },
    Ban {
        within: EDGES,
        except: &[],
        paths: &[
            "pharos::scheduler",
            "pharos::supervisor",
            "pharos::wire",
            "pharos::arena",
            "pharos::shm",
        ],
        advice: "http and grpc use only the operations of a service: add an operation to \
                 pharos::service",
    },
    Ban {
        within: &["frontend/", "worker/src/"],
        except: &[
            "frontend/http/",
            "frontend/openai/",
            "frontend/telemetry/src/log/lines.rs",
            "frontend/engine/src/store/objects/credentials.rs",
            "frontend/torchserve/",
        ],
        paths: &["serde_json"],
        advice: "JSON values are private to pharos-http, pharos-openai, pharos-torchserve, the log and Triton's \
                 file of credentials (and to the core's readers and renderers)",
    },
    Ban {
        within: &["src/", "frontend/", "worker/src/"],
        except: &[
            "src/load_report/message.rs",
            "src/metrics/exposition/protobuf.rs",
            "src/model",
            "src/base/otlp.rs",
            "src/metrics/otlp",
            "src/trace/otlp.rs",
            "frontend/grpc/",
            "frontend/telemetry/src/otlp/grpc.rs",
            "frontend/listener/src/receiving/grpc",
            // Statuses and bodies, not messages.
            "frontend/edge/src/",
            "frontend/listener/src/service.rs",
            "frontend/torchserve/src/grpc",
            "frontend/torchserve/src/rest/port_policy.rs",
        ],
        paths: PROTOBUF,
        advice: "generated protobuf is private to pharos-grpc, src/load_report/message.rs, \
                 src/model, the scrape in protobuf and the encoders of OTLP: use the core's types",
    },
];

/// The packages, from the highest down. The code of a package below `source` may use packages of
/// lower floors; its tests may use any.
pub(crate) const PACKAGES: &[Layering] = &[
    Layering {
        source: "src/",
        floors: &[
            independent(&["pharos"]),
            independent(&["pharos-metrics"]),
            independent(&["pharos-base"]),
        ],
    },
    Layering {
        source: "frontend/",
        floors: &[
            independent(&["pharos-frontend"]),
            independent(&[
                "pharos-engine",
                "pharos-grpc",
                "pharos-http",
                "pharos-top",
                "pharos-torchserve",
            ]),
            independent(&["pharos-openai"]),
            independent(&["pharos-edge", "pharos-telemetry"]),
            independent(&["pharos-listener"]),
            independent(&["pharos-os"]),
            independent(&["pharos"]),
        ],
    },
    Layering {
        source: "worker/",
        floors: &[
            independent(&["pharos-worker-python", "pharos-worker-tract"]),
            independent(&["pharos-worker-text"]),
            independent(&["pharos-worker"]),
            independent(&["pharos-triton"]),
            independent(&["pharos-backend"]),
            independent(&["pharos"]),
        ],
    },
];

/// Texts that code may not contain, outside tests.
pub(crate) struct Text {
    /// The rule applies to files with one of these prefixes,
    pub(crate) within: &'static [&'static str],
    /// except those with one of these prefixes.
    pub(crate) except: &'static [&'static str],
    /// A regular expression, applied to each line.
    pub(crate) pattern: &'static str,
    /// Why, and what to do instead.
    pub(crate) advice: &'static str,
}

/// The banned texts.
pub(crate) const TEXTS: &[Text] = &[
    Text {
        within: &["frontend/", "worker/src/", "worker/backend/src/"],
        except: &[],
        pattern: r#""(?:nv_inference|nv_model|nv_cache|nv_gpu|nv_cpu|ts_inference|ts_queue)"#,
        advice: "a metric is named once, in metrics.yaml: refer to it by the enum of built-ins",
    },
    Text {
        within: &["src/", "frontend/", "worker/", "tests/service_double/", "examples/"],
        except: TORCHSERVE,
        pattern: r"(?i-u)torch[ _-]?serve",
        advice: "TorchServe has its own places: pass a policy or a view that its package defines",
    },
    Text {
        within: &["frontend/"],
        except: &[],
        pattern: r"cfg\(not\(test\)\)|cfg_attr\(test, allow\(dead_code\)\)",
        advice: "unit tests compile all code: make it generic over a trait of the core, and test \
                 it with a double",
    },
];

/// The pages of the book.
pub(crate) const BOOK: &str = "docs/src/";

/// The definition of the metrics, and the enum of the built-in ones.
pub(crate) const METRICS_DEFINITION: &str = "metrics.yaml";
pub(crate) const METRICS_ENUM: &str = "src/metrics/builtin.rs";

/// Metrics of the worker's runtime, which has no enum.
pub(crate) const METRICS_OF_THE_WORKER: &[&str] = &[
    "HandlerTime",
    "PredictionTime",
    "pharos_sequence_state_bytes",
    "pharos_llm_running_requests",
    "pharos_llm_waiting_requests",
    "pharos_llm_kv_cache_usage_ratio",
    "pharos_llm_kv_cache_tokens",
    "pharos_llm_adapter_requests",
    "pharos_llm_adapter_slots",
    "pharos_text_tokens_total",
    "pharos_text_padding_tokens_total",
    "pharos_text_truncated_inputs_total",
    "pharos_text_batch_tokens",
    "pharos_text_tokenization_seconds",
];
