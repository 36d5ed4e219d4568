//! Parts that every object needs.

/// The licence: the kernel lets only GPL-compatible programs use the helpers for tracing.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Never reached: the verifier refuses programs that could loop, and no code here can panic.
    loop {}
}
