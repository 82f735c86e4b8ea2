//! Settings by name.

use std::ffi::c_char;

use netsum_worker::{Error, Settings};

use crate::status::{clear, netsum_status, null, status, text};

/// Settings. One thread at a time may use one.
#[expect(non_camel_case_types, reason = "C's name")]
pub struct netsum_config(pub(crate) Settings);

/// Creates settings from the environment: NETSUM_RANK, NETSUM_RANKS, NETSUM_CONTROLLER, NETSUM_JOB,
/// NETSUM_TOKEN and the others, and rank, ranks and local rank from torchrun, mpirun or srun.
/// netsum_config_free() frees them.
///
/// # Safety
/// `config` points to room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_config_new(config: *mut *mut netsum_config) -> netsum_status {
    versioned!("netsum_config_new");
    // SAFETY: the caller's promise.
    unsafe { clear(config) };
    status(|| {
        if config.is_null() {
            return Err(null("config"));
        }
        let made = Box::into_raw(Box::new(netsum_config(Settings::from_environment())));
        // SAFETY: the caller's promise.
        unsafe { config.write(made) };
        Ok(())
    })
}

/// Replaces one setting: "rank" is NETSUM_RANK in the environment, and so on.
///
/// # Safety
/// `config` comes from netsum_config_new(); the texts end with a null byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_config_set(
    config: *mut netsum_config,
    name: *const c_char,
    value: *const c_char,
) -> netsum_status {
    versioned!("netsum_config_set");
    status(|| {
        // SAFETY: the caller's promise.
        let (config, name, value) =
            unsafe { (config.as_mut(), text("name", name)?, text("value", value)?) };
        config.ok_or_else(|| null("config"))?.0.set(name, value)
    })
}

/// Frees settings; does nothing for NULL.
///
/// # Safety
/// `config` comes from netsum_config_new(), and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netsum_config_free(config: *mut netsum_config) {
    versioned!("netsum_config_free");
    if !config.is_null() {
        // SAFETY: the caller's promise.
        drop(unsafe { Box::from_raw(config) });
    }
}

/// Settings from a caller's pointer, or from the environment if it is null.
///
/// # Safety
/// `config` is null, or comes from [`netsum_config_new`].
pub unsafe fn settings(config: *const netsum_config) -> Result<Settings, Error> {
    // SAFETY: the caller's promise.
    Ok(unsafe { config.as_ref() }
        .map_or_else(Settings::from_environment, |config| config.0.clone()))
}
