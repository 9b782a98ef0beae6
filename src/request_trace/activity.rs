//! The points of a request's processing that a trace records, with Triton's names.

macro_rules! activities {
    ($($variant:ident = $name:literal;)*) => {
        /// A point of a request's processing that gets a stamp, with Triton's name.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Activity {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl Activity {
            /// Returns its name in trace files and in events of spans.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Returns the activity of this name.
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

activities! {
    HttpRecvStart = "HTTP_RECV_START";
    HttpRecvEnd = "HTTP_RECV_END";
    GrpcWaitReadStart = "GRPC_WAITREAD_START";
    GrpcWaitReadEnd = "GRPC_WAITREAD_END";
    RequestStart = "REQUEST_START";
    QueueStart = "QUEUE_START";
    ComputeStart = "COMPUTE_START";
    ComputeInputEnd = "COMPUTE_INPUT_END";
    ComputeOutputStart = "COMPUTE_OUTPUT_START";
    ComputeEnd = "COMPUTE_END";
    RequestEnd = "REQUEST_END";
    ResponseComplete = "INFER_RESPONSE_COMPLETE";
    HttpSendStart = "HTTP_SEND_START";
    HttpSendEnd = "HTTP_SEND_END";
    GrpcSendStart = "GRPC_SEND_START";
    GrpcSendEnd = "GRPC_SEND_END";
}

impl Activity {
    /// Returns whether it marks the end of a request or a whole response, so that a part has at
    /// most one.
    pub(super) fn comes_once(self) -> bool {
        matches!(
            self,
            Self::RequestEnd | Self::ResponseComplete | Self::HttpSendStart | Self::HttpSendEnd
        )
    }
}

/// The point at which a tensor was collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorActivity {
    /// An input when the request entered the queue.
    QueueInput,
    /// An output as returned by the backend.
    BackendOutput,
}

impl TensorActivity {
    /// Returns its name in trace files.
    pub fn name(self) -> &'static str {
        match self {
            Self::QueueInput => "TENSOR_QUEUE_INPUT",
            Self::BackendOutput => "TENSOR_BACKEND_OUTPUT",
        }
    }
}
