//! The host's side of a GPU, on a driver that computes nothing and ends the process when it is misused
//! (`stand_in/driver.c`). NVRTC is the real one. `cargo xtask kernels` builds the driver and puts it into the loader's
//! path.

use std::ffi::CStr;
use std::path::Path;

use corella_core::{PageId, Pooling, SamplingParams, SchedulerConfig, StepId, TokenId};
use corella_cuda::{CudaFactory, CudaOptions};
use corella_model::{
    BatchBuilder, Checkpoint, DType, Executor, ExecutorFactory, ExecutorPlan, KvFormat, KvGroups,
    PageForm,
};

const NUM_PAGES: u32 = 8;
const PAGE_SIZE: u32 = 16;

/// A number that the driver reports about itself.
fn told(name: &CStr) -> i64 {
    // SAFETY: the name is a C string; the library stays loaded, and its functions take nothing and return a long.
    unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!driver.is_null(), "the stand-in is not in LD_LIBRARY_PATH");
        let function = libc::dlsym(driver, name.as_ptr());
        assert!(!function.is_null(), "this driver is not the stand-in");
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> i64>(function)()
    }
}

/// Models are loaded, run the requests of services, and are dropped while steps are in flight.
#[test]
fn an_executor_uses_the_driver_as_it_must_and_gives_everything_back() {
    assert_eq!(told(c"stand_in_num_live"), 0);
    let gpu = corella_cuda::find_gpu()
        .unwrap()
        .expect("the stand-in is a GPU");
    assert_eq!(
        (gpu.name.as_str(), gpu.total_bytes),
        ("stand-in 0", 80 << 30)
    );
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let uses_wgmma = std::env::var("CORELLA_CUDA_WGMMA").is_ok_and(|value| value == "1");
    for name in ["llama-gqa-tied-bf16", "qwen3-gqa-tied-bf16", "gemma2"] {
        let options = CudaOptions {
            memory_utilization: 0.9,
            is_batch_invariant: true,
            max_logprobs: 4,
        };
        let factory = CudaFactory::open(0, options).unwrap();
        let mut executor = load(&factory, &golden.join(name));
        executor.warm_up().unwrap();
        let numbers = [
            c"stand_in_num_launches",
            c"stand_in_num_graph_launches",
            c"stand_in_num_cluster_launches",
        ];
        let before = numbers.map(told);
        run(executor.as_mut());
        let after = numbers.map(told);
        assert!(
            after[0] > before[0] && after[1] > before[1],
            "{before:?} {after:?}"
        );
        // The second batch has 33 rows, one more than narrow kernels take.
        let takes_clusters = uses_wgmma && name.ends_with("bf16");
        assert_eq!(after[2] > before[2], takes_clusters, "{name}");
        drop(executor);
        drop(factory);
        assert_eq!(told(c"stand_in_num_live"), 0, "{name}");
    }
}

fn load(factory: &CudaFactory, folder: &Path) -> Box<dyn Executor> {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let spec = checkpoint.config().spec.clone();
    let mut limits = SchedulerConfig::new(NUM_PAGES, PAGE_SIZE, spec.max_position as u32);
    limits.max_num_seqs = 4;
    let plan = ExecutorPlan {
        weights: Some(checkpoint.weights().unwrap()),
        limits: &limits,
        weight_format: None,
        kv_format: KvFormat::Float(DType::Bf16),
        kv_groups: KvGroups::one(&spec),
        max_adapter_rank: None,
        is_draft: false,
        image: None,
        on_layer: &|_| (),
        spec,
    };
    factory.build(plan).unwrap().executor
}

/// Prompts in parts, scores, a hidden state, copies of pages, and steps whose tokens are draws of steps in flight. The
/// results of draws come from memory that no kernel wrote.
fn run(executor: &mut dyn Executor) {
    let prompt: Vec<TokenId> = (1..=20).collect();
    let sampling = SamplingParams {
        logprobs: Some(4),
        prompt_logprobs: Some(2),
        ..SamplingParams::GREEDY
    };
    let mut builder = BatchBuilder::new(0);
    builder
        .start(0, prompt.len(), &sampling)
        .pages(0, 0, &[3, 1]);
    builder.start(1, prompt.len(), &SamplingParams::GREEDY);
    builder.pages(1, 0, &[0, 2]);
    builder
        .span(0, 0, &prompt[..7], false)
        .logprobs(1..7, Some(prompt[7]));
    let first = builder.build();
    builder.span(0, 7, &prompt[7..], true);
    builder
        .span(1, 0, &prompt, true)
        .pool(Pooling::LastToken, true);
    let second = builder.build();
    builder.copy(1, 4, 4).pages(0, 2, &[5]);
    builder.span_from_step(0, 20, 1).span_from_step(1, 20, 1);
    let third = builder.build();
    builder.span_from_step(0, 21, 2).span_from_step(1, 21, 2);
    let fourth = builder.build();
    builder.release(1);
    builder.span_from_step(0, 22, 3);
    let fifth = builder.build();
    for (index, batch) in [first, second, third, fourth, fifth]
        .into_iter()
        .enumerate()
    {
        let step = batch.step;
        executor.submit(batch).unwrap();
        executor.sample(step, Vec::new()).unwrap();
        if index > 0 {
            assert_eq!(executor.wait().unwrap().step, StepId(index as u64 - 1));
        }
    }
    // Pages are copied during steps.
    let pages = executor.kv_pages();
    let mut page = vec![0; pages.geometry().layer_bytes()];
    for form in [PageForm::Native, PageForm::Canonical] {
        // SAFETY: the steps that write to the first page have returned, and no request has the second one.
        unsafe {
            pages.read(0, &[PageId(3)], form, &mut page);
            pages.write(0, &[PageId(7)], form, &page);
        }
    }
    // The last step is in flight when the executor is dropped.
}
