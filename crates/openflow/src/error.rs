//! Why a message cannot be decoded or encoded.

use thiserror::Error;

use crate::codes::ErrorCode;
use crate::version::Version;

/// Why a received message is malformed. Nothing of the message is used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message} with version {version:#04x}: {field} at byte {offset}: {reason}")]
pub struct DecodeError {
    /// Name of the message, as in the specification without its prefix.
    pub message: &'static str,
    /// First byte of the message.
    pub version: u8,
    /// The field.
    pub field: &'static str,
    /// Bytes before the field, from the start of the message.
    pub offset: usize,
    /// What is wrong with it.
    pub reason: Reason,
    /// The error to answer with.
    pub code: ErrorCode,
}

/// What is wrong with a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Reason {
    /// The message, or the structure around the field, ends too early.
    #[error("needs {needed} bytes, and {left} are left")]
    Truncated {
        /// Bytes that the field needs.
        needed: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// A length that the structure cannot have.
    #[error("length {0} is invalid")]
    Length(usize),
    /// Bytes follow where the structure should end.
    #[error("{0} bytes follow the last field")]
    Trailing(usize),
    /// A number that the version does not define.
    #[error("unknown value {0:#x}")]
    Unknown(u64),
    /// A value outside its range.
    #[error("value {0:#x} is out of range")]
    Range(u64),
    /// A field that may occur once occurs again.
    #[error("occurs twice")]
    Duplicate,
}

impl DecodeError {
    /// The same error, answered with another code.
    pub(crate) fn answered(self, code: ErrorCode) -> Self {
        Self { code, ..self }
    }
}

/// Why a message cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{message} cannot be sent with OpenFlow {version}: {field} {reason}")]
pub struct EncodeError {
    /// Name of the message, as in the specification without its prefix.
    pub message: &'static str,
    /// The version.
    pub version: Version,
    /// The field.
    pub field: &'static str,
    /// Why it cannot be encoded.
    pub reason: Unfit,
}

/// Why a field cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unfit {
    /// The version cannot express the value.
    #[error("has a value that this version cannot express")]
    Inexpressible,
    /// The version requires a value.
    #[error("is missing")]
    Missing,
    /// The value is outside the field's range.
    #[error("is out of range")]
    Range,
    /// The encoding is longer than its length field allows.
    #[error("is too long: {0} bytes")]
    Long(usize),
    /// A field that may occur once occurs again.
    #[error("occurs twice")]
    Duplicate,
}
