//! Matrix products with cuBLASLt. The algorithm that it recommends for a shape is queried once.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Mutex;

use corella_model::DeviceError;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

use crate::device::{DevicePointer, Element, Product, dynamic_library};

/// The size of the workspace that NVIDIA recommends for its largest GPUs.
pub const WORKSPACE_BYTES: usize = 32 << 20;

/// `CUBLAS_OP_T` of the library's header, which the bindings lack.
const OPERATION_TRANSPOSED: i32 = 1;

const FUNCTIONS: [&str; 13] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
];

#[derive(Debug)]
pub struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: DevicePointer,
    plans: Mutex<HashMap<Shape, Plan>>,
}

// SAFETY: a handle may be used by several threads, and plans are never changed.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

/// The parameters by which an algorithm is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    out_stride: usize,
    element: Element,
    out_element: Element,
    /// Alignments of weight, input and output in bytes, up to the largest relevant one.
    alignments: [u32; 3],
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    input: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Products {
    /// Loads the library. The context is current, and `workspace` has `WORKSPACE_BYTES`.
    pub fn open(workspace: DevicePointer) -> Result<Self, DeviceError> {
        dynamic_library::CUBLAS_LT.load(&FUNCTIONS)?;
        Ok(Self {
            handle: result::create_handle().map_err(|error| failed("start", error))?,
            workspace,
            plans: Mutex::default(),
        })
    }

    /// Computes a product on a stream.
    ///
    /// # Safety
    /// As for `Device::multiply`; the context is current.
    pub unsafe fn multiply(
        &self,
        product: &Product,
        stream: sys::cudaStream_t,
    ) -> Result<(), DeviceError> {
        if product.m == 0 || product.n == 0 {
            return Ok(());
        }
        let alignment = |pointer: DevicePointer| 1 << pointer.0.trailing_zeros().min(8);
        let shape = Shape {
            m: product.m,
            n: product.n,
            k: product.k,
            out_stride: product.out_stride,
            element: product.element,
            out_element: product.out_element,
            alignments: [product.weight, product.input, product.out].map(alignment),
        };
        let plan = {
            let mut plans = self.plans.lock().unwrap();
            match plans.get(&shape) {
                Some(plan) => *plan,
                None => {
                    let plan = self.plan(&shape).map_err(|error| {
                        let Shape { m, n, k, .. } = shape;
                        failed(&format!("plan a product of {m} x {k} by {k} x {n}"), error)
                    })?;
                    plans.insert(shape, plan);
                    plan
                }
            }
        };
        let alpha = 1.0_f32;
        let beta = if product.adds { 1.0_f32 } else { 0.0 };
        // SAFETY: the plan fits the product, whose memory the caller vouches for, and the workspace is only used by
        // this stream.
        unsafe {
            result::matmul(
                self.handle,
                plan.operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                product.weight.0 as *const c_void,
                plan.weight,
                product.input.0 as *const c_void,
                plan.input,
                product.out.0 as *const c_void,
                plan.out,
                product.out.0 as *mut c_void,
                plan.out,
                &plan.algorithm,
                self.workspace.0 as *mut c_void,
                WORKSPACE_BYTES,
                stream,
            )
        }
        .map_err(|error| failed("multiply matrices", error))
    }

    /// Matrices of cuBLASLt are column-major: the computed product is `outᵀ[n][m] = weight[n][k] · input[m][k]ᵀ`, and
    /// cuBLASLt takes the row-major weight for its transpose.
    fn plan(&self, shape: &Shape) -> Result<Plan, CublasError> {
        let Shape { m, n, k, .. } = *shape;
        let data_type = |element| match element {
            Element::F32 => sys::cudaDataType::CUDA_R_32F,
            Element::Bf16 => sys::cudaDataType::CUDA_R_16BF,
        };
        let layout = |element, rows: usize, columns: usize, stride: usize| {
            result::create_matrix_layout(
                data_type(element),
                rows as u64,
                columns as u64,
                stride as i64,
            )
        };
        let operation = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )?;
        let weight = layout(shape.element, k, n, k)?;
        let input = layout(shape.element, k, m, k)?;
        let out = layout(shape.out_element, n, m, shape.out_stride)?;
        let preference = result::create_matmul_pref()?;
        // SAFETY: the descriptors exist, and each attribute has the type that is documented for it.
        let heuristic = unsafe {
            let transposed = OPERATION_TRANSPOSED;
            result::set_matmul_desc_attribute(
                operation,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
            use sys::cublasLtMatmulPreferenceAttributes_t::*;
            let bytes = WORKSPACE_BYTES as u64;
            result::set_matmul_pref_attribute(
                preference,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of_val(&bytes),
            )?;
            let [weight_alignment, input_alignment, out_alignment] = shape.alignments;
            for (attribute, alignment) in [
                (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, weight_alignment),
                (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, input_alignment),
                (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_alignment),
                (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_alignment),
            ] {
                let value = (&raw const alignment).cast();
                result::set_matmul_pref_attribute(
                    preference,
                    attribute,
                    value,
                    size_of_val(&alignment),
                )?;
            }
            let heuristic = result::get_matmul_algo_heuristic(
                self.handle,
                operation,
                weight,
                input,
                out,
                out,
                preference,
            );
            result::destroy_matmul_pref(preference)?;
            heuristic?
        };
        Ok(Plan {
            operation,
            weight,
            input,
            out,
            algorithm: heuristic.algo,
        })
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        let plans = self
            .plans
            .get_mut()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        // SAFETY: the descriptors and the handle belong to this value, and its products are done. Leaks end with the
        // process.
        unsafe {
            for plan in plans.values() {
                for layout in [plan.weight, plan.input, plan.out] {
                    let _ = result::destroy_matrix_layout(layout);
                }
                let _ = result::destroy_matmul_desc(plan.operation);
            }
            let _ = result::destroy_handle(self.handle);
        }
    }
}

fn failed(what: &str, error: CublasError) -> DeviceError {
    DeviceError(format!("cuBLASLt could not {what}: {:?}", error.0))
}
