//! The instructions of the processor that llama.cpp uses. The build fixes them. With the feature
//! `variants`, the fastest variant of ggml's library that the processor can run is loaded instead.

/// Returns an error unless the processor has the instructions of this build.
#[cfg(not(feature = "variants"))]
pub(crate) fn prepare() -> Result<(), String> {
    #[cfg(target_arch = "x86_64")]
    {
        let has_all = std::arch::is_x86_feature_detected!("avx2")
            && std::arch::is_x86_feature_detected!("fma")
            && std::arch::is_x86_feature_detected!("f16c")
            && std::arch::is_x86_feature_detected!("bmi2");
        if !has_all {
            return Err("this build of llama.cpp needs a processor with the instructions AVX2, \
                        FMA, F16C and BMI2"
                .to_owned());
        }
    }
    Ok(())
}

/// Loads the variant of ggml's library for this processor, once in a process.
///
/// # Errors
/// The directory of this library has no variant that the processor can run.
#[cfg(feature = "variants")]
pub(crate) fn prepare() -> Result<(), String> {
    use std::sync::OnceLock;

    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            let directory = own_directory()
                .ok_or("the directory of the backend llamacpp is unknown to the linker")?;
            llama_cpp_2::llama_backend::load_backends_from_path(&directory);
            // SAFETY: the function has no precondition.
            let processor = unsafe {
                llama_cpp_sys_2::ggml_backend_dev_by_type(
                    llama_cpp_sys_2::GGML_BACKEND_DEVICE_TYPE_CPU,
                )
            };
            match processor.is_null() {
                true => Err(format!(
                    "'{}' has no library libggml-cpu-*.so that this processor can run",
                    directory.display()
                )),
                false => Ok(()),
            }
        })
        .clone()
}

/// Returns the directory of the file that contains this function.
#[cfg(feature = "variants")]
fn own_directory() -> Option<std::path::PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    let mut found = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the first argument is only compared with the ranges of loaded files, and `found` has
    // the type that the function fills in.
    let status = unsafe { libc::dladdr((prepare as *const ()).cast(), found.as_mut_ptr()) };
    if status == 0 {
        return None;
    }
    // SAFETY: all bytes were set above, and zero is a valid value of each field.
    let found = unsafe { found.assume_init() };
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the linker's texts end with a NUL and live as long as this library is loaded.
    let file = unsafe { std::ffi::CStr::from_ptr(found.dli_fname) };
    Path::new(std::ffi::OsStr::from_bytes(file.to_bytes())).parent().map(Path::to_path_buf)
}
