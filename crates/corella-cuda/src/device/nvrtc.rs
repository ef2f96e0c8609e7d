//! Kernel sources as machine code of a GPU, from NVRTC. NVRTC needs no GPU and no driver.

use std::ffi::{CStr, CString, c_char};

use corella_model::DeviceError;
use cudarc::nvrtc::sys;

use super::{ModuleSource, dynamic_library};
use crate::kernel_include::INCLUDES;

const FUNCTIONS: [&str; 11] = [
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLogSize",
    "nvrtcGetProgramLog",
    "nvrtcGetCUBINSize",
    "nvrtcGetCUBIN",
    "nvrtcGetErrorString",
    "nvrtcGetNumSupportedArchs",
    "nvrtcGetSupportedArchs",
];

/// The options of the code, besides the source and the architecture. A multiply-add fuses only where a source asks for
/// it, so that results do not depend on the compiler.
const OPTIONS: [&str; 3] = ["-std=c++17", "-fmad=false", "-default-device"];

/// NVRTC, found and loaded.
#[derive(Clone, Copy, Debug)]
pub struct Nvrtc {
    version: (i32, i32),
}

#[derive(Debug)]
pub struct Compiled {
    pub cubin: Vec<u8>,
    /// The assembler's report about each kernel, if requested.
    #[cfg(feature = "kernel-table")]
    pub log: String,
}

impl Nvrtc {
    pub fn open() -> Result<Self, DeviceError> {
        dynamic_library::NVRTC.load(&FUNCTIONS)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the library is loaded and has the function, which writes two integers.
        let result = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
        check(result, "tell its version")?;
        Ok(Self {
            version: (major, minor),
        })
    }

    pub fn version(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The toolkit's major version, which is the least version that the driver must have.
    pub fn major_version(&self) -> i32 {
        self.version.0
    }

    /// The compilation target for GPUs of a compute capability.
    pub fn architecture(&self, capability: (i32, i32)) -> Result<String, DeviceError> {
        let mut len = 0;
        // SAFETY: the library is loaded, and the list has the reported length.
        let known = unsafe {
            check(
                sys::nvrtcGetNumSupportedArchs(&mut len),
                "count architectures",
            )?;
            let mut known = vec![0; len as usize];
            let result = sys::nvrtcGetSupportedArchs(known.as_mut_ptr());
            check(result, "list architectures")?;
            known
        };
        architecture_of(&known, capability).ok_or_else(|| {
            let (major, minor) = capability;
            DeviceError(format!(
                "NVRTC {} knows no GPUs of compute capability {major}.{minor}: install a newer one with pip, \
                 nvidia-cuda-nvrtc-cu12 or nvidia-cuda-nvrtc, or use --device cpu",
                self.version()
            ))
        })
    }

    /// A hash of everything that the code of a source depends on, as the key of a cache.
    pub fn key(&self, source: &ModuleSource, architecture: &str) -> u128 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        let mut add = |part: &[u8]| {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        add(&self.version.0.to_le_bytes());
        add(&self.version.1.to_le_bytes());
        for option in options(source, architecture) {
            add(option.as_bytes());
        }
        for &(name, text) in INCLUDES {
            add(name.as_bytes());
            add(text.as_bytes());
        }
        add(source.name.as_bytes());
        add(source.text.as_bytes());
        hash.digest128()
    }

    /// Compiles for an architecture such as `sm_90a`.
    pub fn compile(
        &self,
        source: &ModuleSource,
        architecture: &str,
        explains: bool,
    ) -> Result<Compiled, DeviceError> {
        let mut options = options(source, architecture);
        if explains {
            options.push("--ptxas-options=-v".into());
        }
        let options: Vec<CString> = options.into_iter().map(c_string).collect();
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let program = Program::new(source)?;
        // SAFETY: the program exists, and the options are C strings.
        let result =
            unsafe { sys::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) };
        let log = program.log()?;
        if result != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(DeviceError(format!(
                "{} does not compile for {architecture} with NVRTC {} ({}):\n{log}",
                source.name,
                self.version(),
                reason(result)
            )));
        }
        let mut len = 0;
        // SAFETY: the program was compiled, and the buffer has NVRTC's length.
        let cubin = unsafe {
            check(
                sys::nvrtcGetCUBINSize(program.0, &mut len),
                "give the size of a cubin",
            )?;
            let mut cubin = vec![0_u8; len];
            let result = sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast());
            check(result, "give a cubin")?;
            cubin
        };
        Ok(Compiled {
            cubin,
            #[cfg(feature = "kernel-table")]
            log,
        })
    }
}

/// The compilation target for a compute capability, among known architectures such as 90: the capability itself, or the
/// first of its generation, because a GPU runs code for earlier members of its generation. Some instructions exist only
/// in 9.0, and need the target `sm_90a`.
fn architecture_of(known: &[i32], (major, minor): (i32, i32)) -> Option<String> {
    let of_generation = 10 * major;
    let found = [of_generation + minor, of_generation]
        .into_iter()
        .find(|architecture| known.contains(architecture))?;
    match found {
        90 => Some("sm_90a".into()),
        found => Some(format!("sm_{found}")),
    }
}

fn options(source: &ModuleSource, architecture: &str) -> Vec<String> {
    let mut options: Vec<String> = OPTIONS.map(String::from).into();
    options.push(format!("--gpu-architecture={architecture}"));
    let defines = source.defines.iter();
    options.extend(defines.map(|(name, value)| format!("-D{name}={value}")));
    options
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &ModuleSource) -> Result<Self, DeviceError> {
        let (names, texts): (Vec<CString>, Vec<CString>) = INCLUDES
            .iter()
            .map(|&(name, text)| (c_string(name), c_string(text)))
            .unzip();
        let pointers = |strings: &[CString]| -> Vec<*const c_char> {
            strings.iter().map(|string| string.as_ptr()).collect()
        };
        let (names, texts) = (pointers(&names), pointers(&texts));
        let (name, text) = (c_string(source.name), c_string(source.text));
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings are C strings and outlive the call, which copies them.
        let result = unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                text.as_ptr(),
                name.as_ptr(),
                names.len() as i32,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        check(result, "take a source")?;
        Ok(Self(program))
    }

    fn log(&self) -> Result<String, DeviceError> {
        let mut len = 0;
        // SAFETY: the program exists, and the buffer has NVRTC's length.
        unsafe {
            check(
                sys::nvrtcGetProgramLogSize(self.0, &mut len),
                "give the size of a log",
            )?;
            let mut log = vec![0_u8; len];
            check(
                sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()),
                "give a log",
            )?;
            log.truncate(len.saturating_sub(1));
            Ok(String::from_utf8_lossy(&log).into_owned())
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program belongs to this value.
        unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

fn c_string(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).expect("sources and macros have no NUL")
}

fn reason(result: sys::nvrtcResult) -> String {
    // SAFETY: the function returns a C string for any number.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    text.to_string_lossy().into_owned()
}

fn check(result: sys::nvrtcResult, what: &str) -> Result<(), DeviceError> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        _ => Err(DeviceError(format!(
            "NVRTC could not {what}: {}",
            reason(result)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_for_an_architecture_that_is_known() {
        let of_12_8 = [50, 60, 70, 75, 80, 86, 87, 89, 90, 100, 101, 120];
        for (capability, architecture) in [
            ((8, 0), Some("sm_80")),
            ((8, 9), Some("sm_89")),
            ((9, 0), Some("sm_90a")),
            ((10, 0), Some("sm_100")),
            ((10, 3), Some("sm_100")),
            ((12, 1), Some("sm_120")),
            ((11, 0), None),
            ((13, 0), None),
        ] {
            let found = architecture_of(&of_12_8, capability);
            assert_eq!(found.as_deref(), architecture, "{capability:?}");
        }
    }
}
