//! What the rules still tolerate: each list only shrinks, and an entry that is true no more fails.

/// Sibling modules that use each other.
pub(crate) struct Cycle {
    /// Where the crate's source is.
    pub(crate) source: &'static str,
    /// The module above them; empty for the crate's root.
    pub(crate) parent: &'static str,
    /// Their names in alphabetical order.
    pub(crate) modules: &'static [&'static str],
    /// Why they are still here.
    #[expect(dead_code, reason = "for the reader")]
    pub(crate) reason: &'static str,
}

/// The cycles of modules that are left.
pub(crate) const CYCLES: &[Cycle] = &[
    Cycle {
        source: "frontend/src/",
        parent: "cli",
        modules: &["models", "workers"],
        reason: "both commands share their output and errors",
    },
    Cycle {
        source: "frontend/src/",
        parent: "engine",
        modules: &["exchange", "responses"],
        reason: "an exchange ends with a reply that its responses describe",
    },
    Cycle {
        source: "frontend/src/",
        parent: "http",
        modules: &["codec", "generate", "infer", "trace"],
        reason: "a hook for fuzzing, and the tracing of an edge",
    },
    Cycle {
        source: "frontend/src/",
        parent: "launch",
        modules: &["archive", "interpreter"],
        reason: "an environment is made by an interpreter that it names",
    },
    Cycle {
        source: "frontend/src/",
        parent: "repository",
        modules: &["ensemble", "load", "responses", "serving"],
        reason: "loading, serving and ensembles wait for their own packages",
    },
    Cycle {
        source: "frontend/src/",
        parent: "repository",
        modules: &["given", "objects", "source"],
        reason: "overrides, object stores and sources share their places",
    },
    Cycle {
        source: "frontend/src/",
        parent: "scheduler",
        modules: &["effects", "limits", "sequence"],
        reason: "one driver in three files",
    },
    Cycle {
        source: "frontend/src/",
        parent: "system",
        modules: &["container", "host"],
        reason: "both describe memory",
    },
    Cycle {
        source: "frontend/src/",
        parent: "torchserve",
        modules: &["archive", "deployment"],
        reason: "both describe a deployment",
    },
    Cycle {
        source: "frontend/src/",
        parent: "torchserve::grpc",
        modules: &["inference", "sequences"],
        reason: "both describe a call",
    },
    Cycle {
        source: "frontend/src/",
        parent: "torchserve::registry",
        modules: &["health", "version"],
        reason: "both describe a version",
    },
    Cycle {
        source: "frontend/src/",
        parent: "torchserve::rest",
        modules: &["predict", "streaming"],
        reason: "both check sizes",
    },
    Cycle {
        source: "src/",
        parent: "metrics",
        modules: &[
            "cache",
            "cell",
            "durations",
            "family",
            "journal",
            "named",
            "responses",
            "sample",
            "series",
            "statistics",
            "summary",
        ],
        reason: "one reading of metrics takes their place",
    },
    Cycle {
        source: "worker/python/src/",
        parent: "",
        modules: &["backend", "batch", "call", "request"],
        reason: "a call makes requests, and a request makes calls",
    },
    Cycle {
        source: "worker/python/src/",
        parent: "",
        modules: &["dlpack", "output", "tensor"],
        reason: "tensors and devices share constants",
    },
    Cycle {
        source: "worker/src/",
        parent: "",
        modules: &["backend", "instance", "runtime"],
        reason: "the runtime of a worker waits for its package of traits",
    },
    Cycle {
        source: "worker/src/",
        parent: "backend",
        modules: &["builtin", "on_gpu", "repeat"],
        reason: "one backend in three files",
    },
    Cycle {
        source: "worker/src/",
        parent: "backend::native",
        modules: &["abi", "foreign", "host", "load", "metrics", "outputs", "responses", "running", "slots"],
        reason: "one interface in nine files",
    },
    Cycle { source: "worker/src/", parent: "instance", modules: &["lent", "outputs"], reason: "one loan in two files" },
    Cycle {
        source: "worker/src/",
        parent: "runtime",
        modules: &["board", "responder", "stash"],
        reason: "one reply in three files",
    },
];
