//! The services by which gateways drive vLLM.

pub mod generate;
mod generate_answer;
mod generate_request;
mod inference_message;
