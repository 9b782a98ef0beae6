//! The rules, as tables. To change a rule, change its row and state the reason in its last column.

/// Module names that are not terms of the field.
pub(crate) const PRIVATE_NAMES: &[&str] = &[
    "apart",
    "seen",
    "slow",
    "reread",
    "lent",
    "cut",
    "ways",
    "beside",
    "given",
    "home",
    "open",
    "stash",
    "board",
    "words",
    "asked",
    "workplace",
    "traced",
    "doubtful",
    "shown",
];

/// The places that may name TorchServe: prefixes of paths, and why.
pub(crate) const TORCHSERVE: &[(&str, &str)] = &[
    ("frontend/torchserve/", "its package"),
    ("worker/python/", "its Python interface"),
    ("frontend/src/", "the executable connects its package to the engine, and has its variables"),
    ("frontend/telemetry/src/log", "the layouts of its log files"),
    ("src/metrics/catalog", "its form of metrics.yaml, and its mode names"),
    ("src/metrics/tslog.rs", "its form of metric log lines"),
    ("src/metrics/worker_lines.rs", "its form of lines that workers print"),
    ("src/model/", "the backend `torchserve`, its archives and its request documents"),
];

/// A package and its floors, from the highest down. A module may use lower floors, never higher ones.
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

/// The floors of ARCHITECTURE.md. `lib.rs` and `main.rs` are above all floors and may use everything.
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
                "metrics",
                "shared_memory",
                "wire",
                "yielding",
            ]),
            independent(&["model", "classification", "otlp"]),
            interdependent(&[
                "infer",
                "request_trace",
                "tensor",
                "batch_split",
                "data",
                "region",
                "shm",
                "arena",
                "timeline",
                "id",
                "error",
            ]),
            independent(&["named_enum", "printable"]),
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
            independent(&["cache", "launch", "memory", "model_memory", "onnxruntime", "shared_memory", "store"]),
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
            independent(&["children", "control_groups", "worker_user"]),
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
            independent(&["readiness"]),
            independent(&["backend"]),
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
            independent(&["aligned", "device", "error", "memory", "clock"]),
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
const EDGES: &[&str] = &["frontend/http/", "frontend/grpc/"];
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
        advice: "the core has no sockets, threads, processes or clocks: let the caller pass bytes and the time in",
    },
    Ban {
        within: &["src/"],
        except: &[],
        paths: ASYNC,
        advice: "the core is synchronous: decide here, and perform it in frontend/",
    },
    Ban {
        within: &["worker/"],
        except: &[],
        paths: ASYNC,
        advice: "the worker is synchronous: one batch at a time, blocking I/O",
    },
    Ban {
        within: &["worker/backend/"],
        except: &[],
        paths: &["pharos_worker", "cudarc", "ort"],
        advice: "the backend interface is below the worker's runtime: declare what the runtime provides as a trait there",
    },
    Ban {
        within: &["worker/python/", "examples/backend_rust/", "tests/backends/"],
        except: &[],
        paths: &["pharos_backend::runtime"],
        advice: "backends use the public interface of pharos_backend; its module `runtime` is for pharos-worker",
    },
    Ban {
        within: DECIDERS,
        except: &[],
        paths: &["crate::tensor", "crate::infer", "crate::wire", "crate::metrics", "crate::shm", "crate::arena"],
        advice: "deciders use ids, model and timeline, never payloads or counters: the driver in frontend/engine has those",
    },
    Ban {
        within: &["src/metrics"],
        except: &[],
        paths: &["crate::model", "crate::tensor"],
        advice: "metrics use labels and numbers: pass other data as plain values",
    },
    Ban {
        within: &["src/metrics/exposition", "src/metrics/otlp"],
        except: &[],
        paths: &[
            "crate::metrics::alias",
            "crate::metrics::builtin",
            "crate::metrics::counts",
            "crate::metrics::durations",
            "crate::metrics::series",
            "crate::metrics::source",
        ],
        advice: "a view uses metrics::readings, neither names of metrics nor cells",
    },
    Ban {
        within: EDGES,
        except: &[],
        paths: &["pharos::scheduler", "pharos::supervisor", "pharos::wire", "pharos::arena", "pharos::shm"],
        advice: "http and grpc use only the operations of a service: add an operation to pharos::service",
    },
    Ban {
        within: &["frontend/", "worker/src/"],
        except: &[
            "frontend/http/",
            "frontend/telemetry/src/log/lines.rs",
            "frontend/engine/src/store/objects/credentials.rs",
            "frontend/torchserve/",
        ],
        paths: &["serde_json"],
        advice: "JSON values are private to pharos-http, pharos-torchserve, the log and Triton's file of credentials (and to the core's readers and renderers)",
    },
    Ban {
        within: &["src/", "frontend/", "worker/src/"],
        except: &[
            "src/load_report/message.rs",
            "src/metrics/exposition/protobuf.rs",
            "src/model",
            "src/otlp.rs",
            "src/metrics/otlp",
            "src/trace/otlp.rs",
            "frontend/grpc/",
            "frontend/telemetry/src/otlp/grpc.rs",
            "frontend/listener/src/receiving/grpc",
            "frontend/torchserve/src/grpc",
            "frontend/torchserve/build.rs",
        ],
        paths: PROTOBUF,
        advice: "generated protobuf is private to pharos-grpc, src/load_report/message.rs, src/model, the scrape in protobuf and \
                 the encoders of OTLP: use the core's types",
    },
];

/// A package: its manifest, and the packages and libraries that it may or may not use. Cargo then enforces the floors.
pub(crate) struct Package {
    pub(crate) manifest: &'static str,
    /// The packages of this project that its code may use; its tests may use any.
    pub(crate) uses: &'static [&'static str],
    /// Libraries that its manifest may not name.
    pub(crate) without: &'static [&'static str],
}

const fn package(manifest: &'static str, uses: &'static [&'static str], without: &'static [&'static str]) -> Package {
    Package { manifest, uses, without }
}

const NETWORK: &[&str] = &["tokio", "axum", "tonic", "hyper", "hyper-util", "tower"];
/// The packages that an edge may use.
const EDGE: &[&str] = &["pharos", "pharos-listener", "pharos-os"];

/// The packages of ARCHITECTURE.md.
pub(crate) const PACKAGES: &[Package] = &[
    package("Cargo.toml", &[], NETWORK),
    package("frontend/os/Cargo.toml", &["pharos"], &["axum", "tonic"]),
    package("frontend/telemetry/Cargo.toml", &["pharos", "pharos-os"], &["axum"]),
    package("frontend/engine/Cargo.toml", &["pharos", "pharos-os", "pharos-telemetry"], &["axum", "tonic"]),
    package("frontend/listener/Cargo.toml", &["pharos", "pharos-os"], &[]),
    package("frontend/http/Cargo.toml", EDGE, &["tonic"]),
    package("frontend/top/Cargo.toml", &["pharos", "pharos-os"], &["axum", "tonic"]),
    package("frontend/grpc/Cargo.toml", EDGE, &["axum", "serde_json"]),
    package("frontend/torchserve/Cargo.toml", EDGE, &[]),
    package(
        "frontend/Cargo.toml",
        &[
            "pharos",
            "pharos-engine",
            "pharos-grpc",
            "pharos-http",
            "pharos-listener",
            "pharos-os",
            "pharos-telemetry",
            "pharos-top",
            "pharos-torchserve",
        ],
        &[],
    ),
    package("worker/backend/Cargo.toml", &["pharos"], &["tokio", "cudarc", "ort"]),
    package("worker/Cargo.toml", &["pharos", "pharos-backend"], NETWORK),
    package("worker/python/Cargo.toml", &["pharos", "pharos-backend", "pharos-worker"], NETWORK),
    package("tests/service_double/Cargo.toml", &["pharos"], NETWORK),
    package("tests/backends/Cargo.toml", &["pharos", "pharos-backend", "pharos-worker"], NETWORK),
    // Drives servers like a client; its benchmarks of single paths are tests.
    package("tests/Cargo.toml", &[], &[]),
];

/// The only files with `unsafe`, and the reasons. Each must state its contract.
pub(crate) const UNSAFE: &[(&str, &str)] = &[
    ("src/shm.rs", "mappings of memory that another process writes"),
    ("tests/loom/interleavings.rs", "cells whose accesses loom checks, in tests"),
    ("frontend/os/src/scheduling.rs", "system calls for which no crate has functions"),
    ("frontend/os/src/control_groups.rs", "what a new process does before it becomes a program"),
    ("frontend/os/src/sockets.rs", "an option of sockets for which no crate has a function"),
    ("frontend/os/src/worker_user.rs", "what a new process does before it becomes a program"),
    ("frontend/engine/src/memory.rs", "views into a mapped arena that the arena's rules keep exclusive"),
    ("frontend/engine/src/loader/prepare.rs", "a mapping of a model file, which a user may change concurrently"),
    ("worker/backend/src/memory.rs", "the same for the worker"),
    ("worker/src/pinning.rs", "memory that is registered with the driver of a GPU"),
    ("worker/src/command_line.rs", "the memory of the command line of this process"),
    ("worker/src/descriptors.rs", "ownership of inherited file descriptors"),
    ("worker/src/fork_server/copy.rs", "a copy of this process, its environment and its descriptors"),
    ("worker/src/regions/mapping.rs", "mappings of memory that clients write to and truncate"),
    ("worker/src/regions/fault.rs", "a signal handler, which substitutes zeros for memory that a client truncated"),
    ("worker/src/device/calls.rs", "declarations of calls that use memory after they return"),
    ("worker/src/device/driver.rs", "calls of the CUDA driver across a C interface"),
    ("worker/src/device/work.rs", "copies to and from a device that continue after the call"),
    ("worker/src/device/fake.rs", "the same in tests"),
    ("worker/src/device/fake/memory.rs", "memory that is passed by address, in tests"),
    ("worker/src/backend/native.rs", "calls of a shared library across a C interface"),
    ("worker/src/backend/native/abi.rs", "function types of that interface"),
    ("worker/src/backend/native/foreign.rs", "pointers that the library passes in"),
    ("worker/src/backend/native/host.rs", "functions that the library calls"),
    ("worker/src/backend/native/library.rs", "loading a library and its functions"),
    ("worker/src/backend/native/load.rs", "functions that the library calls while it loads a model"),
    ("worker/src/backend/native/metrics.rs", "functions with which the library records metrics"),
    ("worker/src/backend/native/outputs.rs", "functions with which the library returns outputs"),
    ("worker/src/backend/native/responses.rs", "responses that the library creates, and deferred requests"),
    ("worker/src/backend/native/slots.rs", "objects that the library receives and returns"),
    ("worker/src/backend/native/running.rs", "a batch that the library borrows while it executes"),
    ("worker/python/src/array.rs", "memory of numpy's arrays, over its C interface"),
    ("worker/python/src/dlpack.rs", "tensors of other Python libraries, over DLPack's C interface"),
    ("worker/backend/src/received.rs", "inputs and response memory that outlive a batch"),
    ("worker/src/backend/onnxruntime.rs", "tensors that borrow memory across a C interface"),
    ("worker/src/backend/onnxruntime/device.rs", "the same with device memory"),
    ("worker/src/backend/onnxruntime/providers.rs", "a stream that a library borrows"),
    ("worker/src/backend/onnxruntime/session.rs", "options of a session across a C interface"),
];

/// Prefixes of metric names: a metric is named once, in metrics.yaml; code uses the enum of built-ins.
pub(crate) const METRIC_PREFIXES: &[&str] =
    &["nv_inference", "nv_model", "nv_cache", "nv_gpu", "nv_cpu", "ts_inference", "ts_queue"];

/// The folders in which strings may not contain names of metrics.
pub(crate) const NO_METRIC_NAMES: &[&str] = &["frontend/", "worker/src/", "worker/backend/src/"];

/// The names allowed at the top level: the layout of the project, and files that tools or readers expect there.
pub(crate) const TOP_LEVEL: &[&str] = &[
    "Cargo.toml",
    "src",
    "metrics.yaml",
    "proto",
    "frontend",
    "worker",
    "tests",
    "grafana",
    "prometheus.yaml",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
    "Cargo.lock",
    "build.rs",
    "rustfmt.toml",
    "clippy.toml",
    "deny.toml",
    "rust-toolchain.toml",
    ".gitignore",
    ".gitattributes",
    ".editorconfig",
    ".dockerignore",
    ".cargo",
    ".ci",
    ".github",
    "deploy",
    "docs",
    "examples",
];

/// The pages of the book.
pub(crate) const BOOK: &str = "docs/src/";

/// Folders that exist on one machine only; split so that this file passes its own rule.
pub(crate) const PRIVATE_FOLDERS: &[&str] =
    &[concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];
