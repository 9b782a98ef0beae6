//! The rules themselves, as tables. To change a rule, change its row and say why in its last column.

/// Lines of a Rust file without its test module.
pub(crate) const FILE_LINES: usize = 500;

/// Lines of a function, from `fn` to its closing brace; tests may be as long as their tables.
pub(crate) const FUNCTION_LINES: usize = 60;

/// Arguments of a function without `self`; each element of a tuple counts as one.
pub(crate) const ARGUMENTS: usize = 5;

/// Names of modules that only their builders understand.
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

/// Where words of TorchServe belong: the beginnings of paths, and why.
pub(crate) const TORCHSERVE: &[(&str, &str)] = &[
    ("frontend/torchserve/", "its package"),
    ("worker/python/", "its Python interface"),
    ("frontend/src/", "the executable joins its package to the engine, and has its variables"),
    ("frontend/telemetry/src/log", "the layouts of its log files"),
    ("src/metrics/catalog", "its form of metrics.yaml, and its mode names"),
    ("src/metrics/tslog.rs", "its form of metric log lines"),
    ("src/metrics/worker_lines.rs", "its form of lines that workers print"),
    ("src/model/", "the backend `torchserve`, its archives and its request documents"),
];

/// A package and its floors, from the roof down. A module may use what lies below it, never what lies above.
pub(crate) struct House {
    /// Where its source is.
    pub(crate) source: &'static str,
    pub(crate) floors: &'static [Floor],
}

/// Modules at the same height.
pub(crate) struct Floor {
    pub(crate) modules: &'static [&'static str],
    /// Whether they may use each other.
    pub(crate) among_themselves: bool,
}

const fn apart(modules: &'static [&'static str]) -> Floor {
    Floor { modules, among_themselves: false }
}

const fn together(modules: &'static [&'static str]) -> Floor {
    Floor { modules, among_themselves: true }
}

/// The floors of ARCHITECTURE.md: `lib.rs` and `main.rs` are the roof and may use everything.
pub(crate) const HOUSES: &[House] = &[
    House {
        source: "src/",
        floors: &[
            apart(&["fuzzing"]),
            // The contract between edges and engine, in the nouns of all that lies below.
            apart(&["service"]),
            apart(&[
                "access",
                "scheduler",
                "repository",
                "supervisor",
                "trace",
                "cache",
                "ensemble",
                "metrics",
                "shared_memory",
                "wire",
            ]),
            apart(&["model", "classification"]),
            together(&[
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
        ],
    },
    House {
        source: "frontend/src/",
        floors: &[
            // The start-up order, which main reads aloud.
            apart(&["start"]),
            apart(&["commands"]),
            // Reads the command line into the settings of the packages below.
            apart(&["cli"]),
        ],
    },
    House {
        source: "frontend/engine/src/",
        floors: &[
            apart(&["engine"]),
            apart(&["loader"]),
            apart(&["serving"]),
            apart(&["supervisor", "ensemble"]),
            apart(&["worker_session"]),
            apart(&["calls"]),
            apart(&["scheduler"]),
            apart(&["process"]),
            apart(&["wire"]),
            apart(&["cache", "launch", "memory", "onnxruntime", "shared_memory", "store"]),
        ],
    },
    House {
        source: "frontend/telemetry/src/",
        floors: &[apart(&["statsd", "tslog"]), apart(&["metrics", "log", "system", "trace"])],
    },
    House {
        source: "frontend/os/src/",
        floors: &[apart(&["client", "clock", "descriptors", "directories", "file_watch"])],
    },
    House {
        source: "worker/src/",
        floors: &[
            apart(&["instance"]),
            apart(&["backend"]),
            apart(&["regions", "pinning", "state", "watch"]),
            apart(&["descriptors", "device"]),
        ],
    },
    House {
        source: "worker/backend/src/",
        floors: &[
            apart(&["readiness"]),
            apart(&["backend"]),
            apart(&["outputs", "batch", "calls"]),
            apart(&["responder"]),
            apart(&["session"]),
            apart(&["connection"]),
            apart(&["streams"]),
            apart(&["deferred"]),
            apart(&["reply", "blocks"]),
            apart(&["received", "metrics", "client_memory"]),
            apart(&["aligned", "device", "error", "frames", "memory", "clock"]),
        ],
    },
];

/// Paths that some places may not name.
pub(crate) struct Ban {
    /// Files that begin with one of these.
    pub(crate) within: &'static [&'static str],
    /// But not those that begin with one of these.
    pub(crate) except: &'static [&'static str],
    /// May not name a path that begins with one of these.
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
    "pharos::model::proto",
    "pharos_grpc::proto",
];

/// Who may not name what.
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
        advice: "the core is synchronous: do it in frontend/, decide it here",
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
        advice: "a backend's interface lies below the worker's runtime: what the runtime provides is a trait in worker/backend",
    },
    Ban {
        within: &["worker/python/", "examples/backend_rust/"],
        except: &[],
        paths: &["pharos_backend::runtime"],
        advice: "a backend uses what pharos_backend offers its authors; its module `runtime` is for pharos-worker",
    },
    Ban {
        within: DECIDERS,
        except: &[],
        paths: &["crate::tensor", "crate::infer", "crate::wire", "crate::metrics", "crate::shm", "crate::arena"],
        advice: "deciders know ids, model and timeline, never payloads or counters: the driver in frontend/engine has those",
    },
    Ban {
        within: &["src/metrics"],
        except: &[],
        paths: &["crate::model", "crate::tensor"],
        advice: "a ledger knows labels and numbers: pass what it needs as plain values",
    },
    Ban {
        within: &["src/metrics/exposition"],
        except: &[],
        paths: &[
            "crate::metrics::alias",
            "crate::metrics::builtin",
            "crate::metrics::counts",
            "crate::metrics::durations",
            "crate::metrics::series",
            "crate::metrics::source",
        ],
        advice: "a view consumes metrics::readings and knows neither metrics by name nor cells",
    },
    Ban {
        within: EDGES,
        except: &[],
        paths: &["pharos::scheduler", "pharos::supervisor", "pharos::wire", "pharos::arena", "pharos::shm"],
        advice: "http and grpc know the verbs of a service and nothing below it: add a verb to pharos::service",
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
            "src/model",
            "src/trace/otlp.rs",
            "frontend/grpc/",
            "frontend/listener/src/receiving/grpc",
            "frontend/torchserve/src/grpc",
            "frontend/torchserve/build.rs",
        ],
        paths: PROTOBUF,
        advice: "generated protobuf is private to pharos-grpc, src/model and src/trace/otlp.rs: use the core's nouns",
    },
];

/// A package: its manifest, what it may use of this project, and libraries that it may not use. Cargo then holds the floors.
pub(crate) struct Package {
    pub(crate) manifest: &'static str,
    /// The packages of this project that its code may depend on; its tests may depend on any.
    pub(crate) uses: &'static [&'static str],
    /// Libraries that no table of its manifest may name.
    pub(crate) without: &'static [&'static str],
}

const fn package(manifest: &'static str, uses: &'static [&'static str], without: &'static [&'static str]) -> Package {
    Package { manifest, uses, without }
}

const NETWORK: &[&str] = &["tokio", "axum", "tonic", "hyper", "hyper-util", "tower"];
/// What an edge is made of.
const EDGE: &[&str] = &["pharos", "pharos-listener", "pharos-os"];

/// The packages of ARCHITECTURE.md.
pub(crate) const PACKAGES: &[Package] = &[
    package("Cargo.toml", &[], NETWORK),
    package("frontend/os/Cargo.toml", &["pharos"], &["axum", "tonic"]),
    package("frontend/telemetry/Cargo.toml", &["pharos", "pharos-os"], &["axum", "tonic"]),
    package("frontend/engine/Cargo.toml", &["pharos", "pharos-os", "pharos-telemetry"], &["axum", "tonic"]),
    package("frontend/listener/Cargo.toml", &["pharos", "pharos-os"], &[]),
    package("frontend/http/Cargo.toml", EDGE, &["tonic"]),
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
            "pharos-torchserve",
        ],
        &[],
    ),
    package("worker/backend/Cargo.toml", &["pharos"], &["tokio", "cudarc", "ort"]),
    package("worker/Cargo.toml", &["pharos", "pharos-backend"], NETWORK),
    package("worker/python/Cargo.toml", &["pharos", "pharos-backend", "pharos-worker"], NETWORK),
    package("tests/service_double/Cargo.toml", &["pharos"], NETWORK),
    // Drives servers as any client does; its benchmarks of single paths are tests.
    package("tests/Cargo.toml", &[], &[]),
];

/// The only files with `unsafe`, each with the reason why it needs it. Each must state its contract.
pub(crate) const UNSAFE: &[(&str, &str)] = &[
    ("src/shm.rs", "mappings of memory that another process writes"),
    ("frontend/engine/src/memory.rs", "views into a mapped arena that the arena's rules keep alone"),
    ("frontend/engine/src/loader/prepare.rs", "a mapping of a model file, which a user may change under us"),
    ("worker/backend/src/memory.rs", "the same on the worker's side"),
    ("worker/src/pinning.rs", "memory that is registered with the driver of a GPU"),
    ("worker/src/descriptors.rs", "ownership of inherited file descriptors"),
    ("worker/src/regions/mapping.rs", "mappings of memory that clients write to and cut off"),
    ("worker/src/regions/fault.rs", "a signal handler, which puts zeros where a client has cut memory off"),
    ("worker/src/device/calls.rs", "calls that use memory after they have returned, declared"),
    ("worker/src/device/driver.rs", "calls of the CUDA driver across a C interface"),
    ("worker/src/device/work.rs", "copies to and from a device that go on after the call"),
    ("worker/src/device/fake.rs", "the same in tests"),
    ("worker/src/device/fake/memory.rs", "memory that others are given by its address, in tests"),
    ("worker/src/backend/native.rs", "calls of a shared library across a C interface"),
    ("worker/src/backend/native/abi.rs", "types of functions across that interface"),
    ("worker/src/backend/native/foreign.rs", "pointers that the library passes in"),
    ("worker/src/backend/native/host.rs", "functions that the library calls"),
    ("worker/src/backend/native/library.rs", "loading a library, and finding functions in it"),
    ("worker/src/backend/native/load.rs", "functions that the library calls while it loads a model"),
    ("worker/src/backend/native/metrics.rs", "functions that the library records metrics with"),
    ("worker/src/backend/native/outputs.rs", "functions that the library answers with"),
    ("worker/src/backend/native/responses.rs", "responses that the library makes, and requests that it answers later"),
    ("worker/src/backend/native/slots.rs", "what the library is handed and gives back"),
    ("worker/src/backend/native/running.rs", "a batch that is lent to the library while it executes it"),
    ("worker/python/src/array.rs", "memory of numpy's arrays, over its C interface"),
    ("worker/python/src/dlpack.rs", "tensors of other Python libraries, over DLPack's C interface"),
    ("worker/backend/src/received.rs", "inputs and memory for answers that outlive a batch"),
    ("worker/src/backend/onnxruntime.rs", "tensors that borrow memory across a C interface"),
    ("worker/src/backend/onnxruntime/device.rs", "the same with memory of a device"),
    ("worker/src/backend/onnxruntime/providers.rs", "a stream that a library is lent"),
    ("worker/src/backend/onnxruntime/session.rs", "options of a session across a C interface"),
];

/// Macros that are not for committed code.
pub(crate) const MACROS: &[&str] = &["todo", "dbg", "unimplemented"];

/// Beginnings of metric names: a metric is named once, in metrics.yaml, and referred to by the catalog's enum.
pub(crate) const METRIC_PREFIXES: &[&str] =
    &["nv_inference", "nv_model", "nv_cache", "nv_gpu", "nv_cpu", "ts_inference", "ts_queue"];

/// Where a metric's name may not stand in a string.
pub(crate) const NO_METRIC_NAMES: &[&str] = &["frontend/", "worker/src/", "worker/backend/src/"];

/// What may stand at the top: the user's own layout, and files that tools or readers look for there.
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

/// Documents with a maximum number of lines of their kind; `None` for no maximum.
pub(crate) const DOCUMENT_LINES: &[(&str, Option<usize>)] =
    &[("README.md", Some(150)), ("ARCHITECTURE.md", Some(200)), ("CHANGELOG.md", None)];

/// The most lines of any other document.
pub(crate) const PAGE_LINES: usize = 300;

/// Folders that exist on one machine only; written in pieces, so that this file keeps its own rule.
pub(crate) const PRIVATE_FOLDERS: &[&str] =
    &[concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/Us", "ers/")];
