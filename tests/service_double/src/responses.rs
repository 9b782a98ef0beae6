//! Responses of the double.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use pharos::error::InferError;
use pharos::infer::{InferOutput, InferRequest, InferResponse};
use pharos::service::{Responses, Streamed};
use pharos::tensor::{DataType, Tensor};

type Single = Pin<Box<dyn Future<Output = Result<InferResponse, InferError>> + Send>>;

/// The responses to one request.
pub(crate) enum EchoResponses {
    /// The response of an ordinary model; the request starts when this is polled.
    One(Single),
    /// The remaining responses, and whether the model is decoupled.
    Many(VecDeque<Streamed>, bool),
}

impl fmt::Debug for EchoResponses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EchoResponses")
            .field("decoupled", &self.is_decoupled())
            .finish_non_exhaustive()
    }
}

impl EchoResponses {
    /// Wraps the response of an ordinary model.
    pub(crate) fn one(
        response: impl Future<Output = Result<InferResponse, InferError>> + Send + 'static,
    ) -> Self {
        Self::One(Box::pin(response))
    }

    /// Creates a response for each element of the first input, and an empty last one.
    pub(crate) fn many(request: &InferRequest) -> Result<Self, InferError> {
        let Some(input) = request.inputs.first() else {
            return Err(InferError::invalid("no input"));
        };
        let elements = input.tensor.data.clone().join();
        let named = || InferResponse {
            model_name: "many".into(),
            id: request.id.clone(),
            ..InferResponse::default()
        };
        let responses = elements.as_chunks().0.iter().map(|&element| {
            let byte = f32::from_le_bytes(element) as u8;
            let tensor = Tensor {
                datatype: DataType::Uint8,
                shape: vec![1],
                data: Bytes::from(vec![byte]).into(),
            };
            let outputs = vec![InferOutput { name: "OUT".into(), tensor }];
            let answer = match byte {
                255 => Err(InferError::internal("asked to fail")),
                _ => Ok(InferResponse { model_version: "1".into(), outputs, ..named() }),
            };
            Streamed { answer, last: false, empty: false }
        });
        let last = Streamed { answer: Ok(named()), last: true, empty: true };
        Ok(Self::Many(responses.chain([last]).collect(), true))
    }
}

impl Responses for EchoResponses {
    fn is_decoupled(&self) -> bool {
        matches!(self, Self::Many(_, true))
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        match self {
            Self::One(response) => {
                let answer = ready!(response.as_mut().poll(cx));
                *self = Self::Many(VecDeque::new(), false);
                Poll::Ready(Some(Streamed { answer, last: true, empty: false }))
            }
            Self::Many(left, _) => Poll::Ready(left.pop_front()),
        }
    }
}
