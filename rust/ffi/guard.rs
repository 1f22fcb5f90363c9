// SPDX-License-Identifier: Apache-2.0
//! The boundary every fallible entry point runs inside of.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::status::{DDT_OK, DDT_PANIC, clear_last_error, ddt_status, set_last_error};
use crate::error::Result;

/// Runs `body`, turns its error or panic into a status, and keeps the text for `ddt_last_error`.
pub(super) fn guard(op: &str, body: impl FnOnce() -> Result<()>) -> ddt_status {
    clear_last_error();
    // unwind safe: no state of the library outlives the call, and caller memory is only written
    // after everything that can fail
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => DDT_OK,
        Ok(Err(error)) => {
            set_last_error(format!("{op}: {error}"));
            error.status().into()
        }
        Err(payload) => {
            set_last_error(format!("{op}: panic, a bug in ddtree: {}", payload_text(&*payload)));
            DDT_PANIC
        }
    }
}

fn payload_text(payload: &(dyn Any + Send)) -> &str {
    if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "no message"
    }
}

#[cfg(test)]
mod tests {
    use super::super::status::ddt_last_error;
    use super::*;
    use crate::error::bail;

    fn last_error(capacity: usize) -> (String, usize) {
        let mut buf = vec![b'#'; capacity];
        let mut needed = 0;
        // SAFETY: the buffer is `capacity` bytes long.
        let status = unsafe { ddt_last_error(buf.as_mut_ptr().cast(), capacity, &mut needed) };
        assert_eq!(status, DDT_OK);
        let end = buf.iter().position(|&byte| byte == 0).expect("terminated");
        (String::from_utf8(buf[..end].to_vec()).expect("UTF-8"), needed)
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_text() {
        assert_eq!(guard("op", || panic!("row {} is odd", 3)), DDT_PANIC);
        assert_eq!(last_error(200).0, "op: panic, a bug in ddtree: row 3 is odd");
        assert_eq!(guard("op", || std::panic::panic_any(7u8)), DDT_PANIC);
        assert_eq!(last_error(200).0, "op: panic, a bug in ddtree: no message");
    }

    #[test]
    fn success_clears_the_text_and_other_threads_have_their_own() {
        let fail = || guard("op", || bail!(InvalidValue, "x: got 1, want 2"));
        assert_eq!(fail(), 104);
        assert_eq!(last_error(200), ("op: x: got 1, want 2".into(), 21));
        let other = std::thread::spawn(|| last_error(200)).join().expect("joined");
        assert_eq!(other, (String::new(), 1));
        assert_eq!(last_error(200).0, "op: x: got 1, want 2");
        assert_eq!(guard("op", || Ok(())), DDT_OK);
        assert_eq!(last_error(1), (String::new(), 1));
    }

    #[test]
    fn text_is_cut_between_characters() {
        guard("op", || bail!(InvalidValue, "ä"));
        assert_eq!(last_error(6), ("op: ".into(), 7));
        assert_eq!(last_error(7), ("op: ä".into(), 7));
    }
}
