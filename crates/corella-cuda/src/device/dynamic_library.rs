//! Libraries of CUDA, which are loaded when a device is opened. The bindings panic when a library or a function is
//! missing, so all of them are looked up here first.

use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};

use corella_model::DeviceError;

pub struct DynamicLibrary {
    /// The names of the library's file, in the order in which the bindings try them.
    file_names: &'static [&'static str],
    /// The library's folders in NVIDIA's Python packages, below `nvidia`: for CUDA 13, then for CUDA 12.
    python_folders: &'static [&'static str],
    /// The library loads some files by name alone. These files lie beside it, and their names begin with this prefix.
    companions: Option<&'static str>,
    /// The error if the library is missing, with the remedy; `ERROR` stands for the loader's reason.
    missing: &'static str,
    /// The library's name in errors.
    name: &'static str,
}

pub const DRIVER: DynamicLibrary = DynamicLibrary {
    file_names: &["libcuda.so", "libcuda.so.1"],
    python_folders: &[],
    companions: None,
    missing: "no NVIDIA driver was found (libcuda.so.1): ERROR; use --device cpu",
    name: "the NVIDIA driver",
};

pub const NVRTC: DynamicLibrary = DynamicLibrary {
    file_names: &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"],
    python_folders: &["cu13", "cuda_nvrtc"],
    // NVRTC 12 looks for this file in its own folder, and NVRTC 13 does not.
    companions: Some("libnvrtc-builtins.so."),
    missing: "NVRTC, which compiles kernels, was not found (libnvrtc.so.12): ERROR; \
              install nvidia-cuda-nvrtc-cu12 with pip in the environment that is active, or cuda-nvrtc-12-8 with apt, \
              or name its folder in LD_LIBRARY_PATH, or use --device cpu",
    name: "NVRTC",
};

pub const CUBLAS_LT: DynamicLibrary = DynamicLibrary {
    file_names: &["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"],
    python_folders: &["cu13", "cublas"],
    companions: None,
    missing: "cuBLASLt, which multiplies matrices, was not found (libcublasLt.so.12): ERROR; \
              install nvidia-cublas-cu12 with pip in the environment that is active, or libcublas-12-8 with apt, \
              or name its folder in LD_LIBRARY_PATH, or use --device cpu",
    name: "cuBLASLt",
};

impl DynamicLibrary {
    /// Loads the library for the rest of the process, and looks for functions in it.
    pub fn load(&self, functions: &[&str]) -> Result<(), DeviceError> {
        let handle = self.find()?;
        for function in functions {
            let symbol = CString::new(*function).expect("a function's name has no NUL");
            // SAFETY: the library is loaded, and the name is a C string.
            if unsafe { libc::dlsym(handle, symbol.as_ptr()) }.is_null() {
                return Err(DeviceError(format!(
                    "{} is too old, as it has no {function}: CUDA 12 or later is needed, or use --device cpu",
                    self.name
                )));
            }
        }
        Ok(())
    }

    fn find(&self) -> Result<*mut c_void, DeviceError> {
        let mut error = String::new();
        for name in self.file_names {
            match open(Path::new(name)) {
                Ok(handle) => return Ok(handle),
                Err(reason) => error = reason,
            }
        }
        // Once a library has been loaded by its path, the bindings find it by its name, if the name has a version.
        let versioned = &self.file_names[1..];
        for path in (self.folders().iter())
            .flat_map(|folder| versioned.iter().map(|name| folder.join(name)))
        {
            if path.is_file() {
                // If a companion does not load, its first use reports that.
                for companion in self.companions_in(path.parent()) {
                    let _ = open(&companion);
                }
                match open(&path) {
                    Ok(handle) => return Ok(handle),
                    Err(reason) => error = reason,
                }
            }
        }
        Err(DeviceError(self.missing.replace("ERROR", &error)))
    }

    fn companions_in(&self, folder: Option<&Path>) -> Vec<PathBuf> {
        let (Some(start), Some(folder)) = (self.companions, folder) else {
            return Vec::new();
        };
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        files
            .filter(|file| {
                let name = file.file_name();
                name.as_encoded_bytes().starts_with(start.as_bytes())
            })
            .map(|file| file.path())
            .collect()
    }

    /// Folders of toolkits and Python packages that the loader does not search.
    fn folders(&self) -> Vec<PathBuf> {
        if self.python_folders.is_empty() {
            return Vec::new();
        }
        let variable = |name: &str| std::env::var_os(name).map(PathBuf::from);
        let mut folders = Vec::new();
        // Environments come first, because their users chose the content.
        let mut prefixes = vec![variable("VIRTUAL_ENV"), variable("CONDA_PREFIX")];
        let path = std::env::var_os("PATH").unwrap_or_default();
        let interpreters =
            std::env::split_paths(&path).filter(|folder| folder.join("python3").exists());
        prefixes.extend(interpreters.map(|folder| folder.parent().map(PathBuf::from)));
        prefixes.push(variable("HOME").map(|home| home.join(".local")));
        for prefix in prefixes.into_iter().flatten() {
            // Conda's folder of libraries.
            folders.push(prefix.join("lib"));
            let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else {
                continue;
            };
            let is_python = |path: &PathBuf| {
                let name = path.file_name().unwrap_or_default();
                name.as_encoded_bytes().starts_with(b"python3")
            };
            let mut pythons: Vec<PathBuf> = entries
                .flatten()
                .map(|entry| entry.path())
                .filter(is_python)
                .collect();
            pythons.sort();
            for python in pythons {
                for packages in ["site-packages", "dist-packages"] {
                    let packages = python.join(packages).join("nvidia");
                    folders.extend(
                        self.python_folders
                            .iter()
                            .map(|folder| packages.join(folder).join("lib")),
                    );
                }
            }
        }
        for toolkit in [
            variable("CUDA_HOME"),
            variable("CUDA_PATH"),
            Some("/usr/local/cuda".into()),
        ] {
            folders.extend(toolkit.map(|toolkit| toolkit.join("lib64")));
        }
        folders
    }
}

fn open(path: &Path) -> Result<*mut c_void, String> {
    let path =
        CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())?;
    // SAFETY: the path is a C string; the libraries of CUDA may be loaded at any time, and are never unloaded here.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        if handle.is_null() {
            return Err(CStr::from_ptr(libc::dlerror())
                .to_string_lossy()
                .into_owned());
        }
        Ok(handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_and_a_missing_function_are_told_in_a_line() {
        let library = DynamicLibrary {
            file_names: &["libcorella-is-not-there.so.1"],
            ..DRIVER
        };
        let error = library.load(&[]).unwrap_err().0;
        let start = "no NVIDIA driver was found (libcuda.so.1): libcorella-is-not-there.so.1: ";
        assert!(
            error.starts_with(start) && error.ends_with("; use --device cpu"),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1);
        let library = DynamicLibrary {
            file_names: &["libc.so.6"],
            ..NVRTC
        };
        assert_eq!(library.load(&["malloc", "free"]), Ok(()));
        let error = library.load(&["malloc", "nvrtcVersion"]).unwrap_err().0;
        assert!(
            error.starts_with("NVRTC is too old, as it has no nvrtcVersion"),
            "{error}"
        );
    }

    #[test]
    fn nvrtc_has_its_own_builtins() {
        let name = format!("corella-dynamic-library-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let builtins = folder.join("libnvrtc-builtins.so.13.0");
        for file in ["libnvrtc.so.13", "libnvrtc-builtins.alt.so.13.0"] {
            std::fs::write(folder.join(file), "").unwrap();
        }
        std::fs::write(&builtins, "").unwrap();
        assert_eq!(NVRTC.companions_in(Some(&folder)), [builtins]);
        assert!(CUBLAS_LT.companions_in(Some(&folder)).is_empty());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
