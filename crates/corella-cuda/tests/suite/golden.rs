//! Compares logits and greedy tokens with Hugging Face Transformers, on tiny models of every dense
//! kind, on the device in host memory. In f32 only the order of sums can differ.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use corella_core::{Pooling, SchedulerConfig};
use corella_cuda::{CudaConfig, CudaExecutor, CudaFactory, CudaOptions, Element, test_device};
use corella_model::golden::{Case, Model, Next, PAGE_SIZE, log_softmax, read_cases};
use corella_model::{
    Checkpoint, DType, ExecutorFactory, ExecutorPlan, KvFormat, KvGroups, ModelConfig, WeightFormat,
};

/// The tolerance in f32, relative to the largest magnitude among a position's logits.
const F32_TOLERANCE: f32 = 1e-4;

/// The tolerance if inputs of linear layers, keys and values are rounded to bf16, with relative
/// errors up to 2^-9.
const BF16_TOLERANCE: f32 = 4e-2;

/// The tolerance if weights are rounded as well. The norms of tiny random models amplify this rounding.
const ROUNDED_WEIGHTS_TOLERANCE: f32 = 2e-1;

/// The tolerance if 4-bit weights are also multiplied in bf16.
const INT4_TOLERANCE: f32 = 7e-2;

#[test]
fn f32_gives_the_golden_logits_and_tokens() {
    for folder in dense("golden") {
        for chunk in [7, usize::MAX] {
            let model = open(&folder, Element::F32, DType::F32);
            for (case, run) in model.run(chunk, Next::Drawn) {
                let name = format!("{}, prompt of {}", folder.display(), case.prompt.len());
                run.check(&case.logits, F32_TOLERANCE, &name);
                assert_eq!(run.tokens, case.tokens, "{name}");
                run.check_all(&case.logits_of_all, F32_TOLERANCE, &name);
            }
        }
    }
}

/// The golden tokens are fed in, because rounding may reverse a near tie.
#[test]
fn bf16_stays_close() {
    for folder in dense("golden") {
        let model = open(&folder, Element::Bf16, DType::Bf16);
        for (case, run) in model.run(64, Next::Golden) {
            let name = format!("{}, prompt of {}", folder.display(), case.prompt.len());
            run.check(&case.logits, bf16_tolerance(&folder), &name);
        }
    }
}

/// Steps of 64 rows and more leave products to the vendor's library, in graphs and without.
#[test]
fn products_of_the_vendors_library_stay_close() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for name in ["llama-gqa-tied-bf16", "gemma2"] {
        let folder = golden.join(name);
        let mut model = open_with(&folder, Element::Bf16, DType::Bf16, |config| {
            config.is_batch_invariant = false;
            config.uses_graphs = true;
        });
        model.executor.warm_up().unwrap();
        for (case, run) in model.run(usize::MAX, Next::Golden) {
            let name = format!("{}, prompt of {}", folder.display(), case.prompt.len());
            run.check(&case.logits, bf16_tolerance(&folder), &name);
        }
    }
}

/// Loads a model like `corella serve`: by the plan of a service, with graphs.
#[test]
fn an_executor_of_the_factory_gives_the_golden_tokens() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let folder = tests.join("golden/llama-gqa-tied-bf16");
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let spec = checkpoint.config().spec.clone();
    let cases = read_cases(&folder);
    let factory = CudaFactory::new(
        test_device(),
        CudaOptions {
            memory_utilization: 0.9,
            is_batch_invariant: true,
            max_logprobs: spec.vocab_size as u32,
        },
    );
    let num_pages = cases.iter().map(Case::num_pages).sum();
    let mut limits = SchedulerConfig::new(num_pages, PAGE_SIZE as u32, spec.max_position as u32);
    limits.max_num_seqs = cases.len() as u32;
    let weights = checkpoint.weights().unwrap();
    let bf16 = WeightFormat::Float(DType::Bf16);
    assert_eq!(factory.weight_format(None, &weights), Ok(bf16));
    let refused = factory.weight_format(Some(WeightFormat::Int8), &weights);
    assert!(refused.unwrap_err().0.contains("stores them, here bf16"));

    let (f32, groups) = (DType::F32, KvGroups::one(&spec));
    let page_bytes = factory.kv_page_bytes(&spec, &groups, &limits, f32.into());
    let vocab_size = spec.vocab_size;
    let num_layers = AtomicUsize::new(0);
    let built = factory.build(ExecutorPlan {
        weights: Some(weights),
        limits: &limits,
        weight_format: Some(WeightFormat::Float(f32)),
        kv_format: f32.into(),
        kv_groups: groups,
        max_adapter_rank: None,
        is_draft: false,
        image: None,
        on_layer: &|num_done| num_layers.store(num_done, Ordering::Relaxed),
        spec,
    });
    let mut executor = built.unwrap().executor;
    assert_eq!(
        num_layers.into_inner(),
        checkpoint.config().spec.layers.len()
    );
    assert_eq!(executor.kv_layout().page_bytes as u64, page_bytes);
    executor.warm_up().unwrap();
    let model = Model {
        executor,
        vocab_size,
        cases,
    };
    for (case, run) in model.run(64, Next::Drawn) {
        let name = format!("prompt of {}", case.prompt.len());
        run.check(&case.logits, F32_TOLERANCE, &name);
        assert_eq!(run.tokens, case.tokens, "{name}");
    }
}

fn bf16_tolerance(folder: &Path) -> f32 {
    let has_bf16 = folder.to_string_lossy().ends_with("bf16");
    match has_bf16 {
        true => BF16_TOLERANCE,
        false => ROUNDED_WEIGHTS_TOLERANCE,
    }
}

#[test]
fn quantised_checkpoints_stay_close() {
    for folder in dense("quantized") {
        let model = open(&folder, Element::Bf16, DType::Bf16);
        for (case, run) in model.run(7, Next::Golden) {
            let name = format!("{}, prompt of {}", folder.display(), case.prompt.len());
            run.check(&case.logits, INT4_TOLERANCE, &name);
        }
    }
}

#[test]
fn prompts_are_scored_by_the_golden_logits() {
    for folder in dense("golden").into_iter().step_by(5) {
        let model = open(&folder, Element::F32, DType::F32);
        for (case, scored) in model.score(19) {
            let name = format!("{}, prompt of {}", folder.display(), case.prompt.len());
            let last = case.tokens.len() - 1;
            for (drawn, logits) in [(0, &case.logits[0]), (last, &case.logits[1])] {
                // The first token of a prompt has no log-probability.
                let scored = &scored[case.prompt.len() + drawn - 1];
                let expected = log_softmax(logits)[scored.token as usize];
                let largest = logits.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let error = (scored.logprobs.token - expected).abs();
                assert!(error <= F32_TOLERANCE * largest, "{name}: {scored:?}");
                assert_eq!(scored.logprobs.rank, 1, "{name}, {drawn}");
            }
        }
    }
}

#[test]
fn hidden_states_are_those_of_transformers() {
    let mut num_cases = 0;
    for folder in dense("golden").into_iter().step_by(5) {
        let Ok(golden) = fs::read(folder.join("hidden.f32")) else {
            continue;
        };
        let golden: Vec<f32> = golden
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect();
        let pooled = [Pooling::LastToken, Pooling::Mean]
            .map(|pooling| open(&folder, Element::F32, DType::F32).pool(pooling, 7));
        let states = pooled[0]
            .iter()
            .zip(&pooled[1])
            .flat_map(|(last, mean)| [last, mean]);
        let states: Vec<_> = states.collect();
        assert_eq!(golden.len(), states.len() * states[0].len());
        for (state, golden) in states.iter().zip(golden.chunks(states[0].len())) {
            let largest = golden.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            for (value, golden) in state.iter().zip(golden) {
                let error = (value - golden).abs();
                assert!(error <= F32_TOLERANCE * largest, "{}", folder.display());
            }
            num_cases += 1;
        }
    }
    assert!(num_cases > 0);
}

fn open(folder: &Path, element: Element, kv_format: impl Into<KvFormat>) -> Model {
    open_with(folder, element, kv_format, |_| ())
}

/// Opens a model like `open`, with a configuration that `change` changes.
fn open_with(
    folder: &Path,
    element: Element,
    kv_format: impl Into<KvFormat>,
    change: impl FnOnce(&mut CudaConfig),
) -> Model {
    let checkpoint = Checkpoint::open(model_of(folder)).unwrap();
    let spec = checkpoint.config().spec.clone();
    let cases = read_cases(folder);
    let mut config = CudaConfig {
        element,
        kv_format: kv_format.into(),
        kv_groups: None,
        num_pages: cases.iter().map(Case::num_pages).sum(),
        page_size: PAGE_SIZE as u32,
        max_num_seqs: cases.len() as u32,
        max_num_batched_tokens: 512,
        max_model_len: spec.max_position as u32,
        max_logprobs: spec.vocab_size as u32,
        is_batch_invariant: true,
        uses_graphs: false,
    };
    change(&mut config);
    let (vocab_size, weights) = (spec.vocab_size, checkpoint.weights().unwrap());
    let device = test_device();
    let executor = CudaExecutor::new(&device, spec, weights, config, &|_| ()).unwrap();
    Model {
        executor: Box::new(executor),
        vocab_size,
        cases,
    }
}

fn model_of(folder: &Path) -> PathBuf {
    let gguf = folder.join("model.gguf");
    if gguf.exists() { gguf } else { folder.into() }
}

/// The folders of a kind with supported models.
fn dense(kind: &str) -> Vec<PathBuf> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
    let is_dense = |folder: &PathBuf| {
        let checkpoint = Checkpoint::open(model_of(folder)).unwrap();
        let config: &ModelConfig = checkpoint.config();
        // The executor refuses the others by name.
        corella_cuda::unsupported(&config.spec).is_none()
    };
    let mut folders: Vec<PathBuf> = fs::read_dir(tests.join(kind))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("golden.json").is_file())
        .filter(is_dense)
        .collect();
    folders.sort();
    assert!(folders.len() >= 5);
    folders
}
