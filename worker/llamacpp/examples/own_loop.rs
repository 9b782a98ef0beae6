//! Generates tokens with llama.cpp alone, as fast as it can: what the server is measured against.
//!
//! Usage: own_loop FILE SEQUENCES TOKENS THREADS. Prints the tokens per second over all sequences, from
//! the first generated token to the last.

use std::num::NonZeroU32;
use std::time::Instant;

use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::token::LlamaToken;

fn most_likely(logits: &[f32]) -> LlamaToken {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    LlamaToken(logits.iter().position(|logit| *logit == highest).unwrap_or(0) as i32)
}

#[allow(clippy::disallowed_methods)] // This program has none of the server's clocks.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, sequences, tokens, threads] = arguments.as_slice() else {
        return Err("usage: own_loop FILE SEQUENCES TOKENS THREADS".into());
    };
    let (sequences, tokens, threads): (i32, i32, i32) =
        (sequences.parse()?, tokens.parse()?, threads.parse()?);
    let mut backend = LlamaBackend::init()?;
    backend.void_logs();
    let model = LlamaModel::load_from_file(&backend, file, &LlamaModelParams::default())?;
    let prompt = model.vocab().tokenize(b"The history of the city begins", true, true);
    let length = prompt.len() as i32;
    let parameters = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new((sequences * (length + tokens + 8)).max(256) as u32))
        .with_n_seq_max(sequences as u32)
        .with_n_batch(512)
        .with_n_ubatch(512)
        .with_n_threads(threads)
        .with_n_threads_batch(threads)
        .with_swa_full(true)
        .with_no_perf(true);
    let mut context = model.new_context(&backend, parameters)?;
    let mut batch = LlamaBatch::new(512, 1);
    let mut next = Vec::new();
    for sequence in 0..sequences {
        batch.clear();
        for (position, token) in (0..).zip(&prompt) {
            batch.add(*token, position, &[sequence], position + 1 == length)?;
        }
        context.decode(&mut batch)?;
        next.push(most_likely(context.get_logits_ith(length - 1)));
    }
    let began = Instant::now();
    for step in 0..tokens {
        batch.clear();
        for (sequence, token) in (0..).zip(&next) {
            batch.add(*token, length + step, &[sequence], true)?;
        }
        context.decode(&mut batch)?;
        for (row, token) in (0..).zip(&mut next) {
            *token = most_likely(context.get_logits_ith(row));
        }
    }
    println!("{:.1}", f64::from(sequences * tokens) / began.elapsed().as_secs_f64());
    Ok(())
}
