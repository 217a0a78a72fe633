//! Types and codes of errors.

use std::fmt;

use crate::version::Version;

/// The type and code of an error message, named after both. Sources: OpenFlow 1.3.5 section 7.4.4, OpenFlow 1.0.1 section 5.4.4.
///
/// 1.0 numbers some codes differently, calls `BAD_MULTIPART` `BAD_STAT`, `BAD_EXPERIMENTER` `BAD_VENDOR`, `BAD_EXP_TYPE` `BAD_SUBTYPE` or
/// `BAD_VENDOR_TYPE`, and `TABLE_FULL` `ALL_TABLES_FULL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ErrorCode {
    /// `OFPHFC_INCOMPATIBLE`
    HelloFailedIncompatible,
    /// `OFPHFC_EPERM`
    HelloFailedEperm,
    /// `OFPBRC_BAD_VERSION`
    BadRequestBadVersion,
    /// `OFPBRC_BAD_TYPE`
    BadRequestBadType,
    /// `OFPBRC_BAD_MULTIPART`
    BadRequestBadMultipart,
    /// `OFPBRC_BAD_EXPERIMENTER`
    BadRequestBadExperimenter,
    /// `OFPBRC_BAD_EXP_TYPE`
    BadRequestBadExpType,
    /// `OFPBRC_EPERM`
    BadRequestEperm,
    /// `OFPBRC_BAD_LEN`
    BadRequestBadLen,
    /// `OFPBRC_BUFFER_EMPTY`
    BadRequestBufferEmpty,
    /// `OFPBRC_BUFFER_UNKNOWN`
    BadRequestBufferUnknown,
    /// `OFPBRC_BAD_TABLE_ID`
    BadRequestBadTableId,
    /// `OFPBRC_IS_SLAVE`
    BadRequestIsSlave,
    /// `OFPBRC_BAD_PORT`
    BadRequestBadPort,
    /// `OFPBRC_BAD_PACKET`
    BadRequestBadPacket,
    /// `OFPBRC_MULTIPART_BUFFER_OVERFLOW`
    BadRequestMultipartBufferOverflow,
    /// `OFPBAC_BAD_TYPE`
    BadActionBadType,
    /// `OFPBAC_BAD_LEN`
    BadActionBadLen,
    /// `OFPBAC_BAD_EXPERIMENTER`
    BadActionBadExperimenter,
    /// `OFPBAC_BAD_EXP_TYPE`
    BadActionBadExpType,
    /// `OFPBAC_BAD_OUT_PORT`
    BadActionBadOutPort,
    /// `OFPBAC_BAD_ARGUMENT`
    BadActionBadArgument,
    /// `OFPBAC_EPERM`
    BadActionEperm,
    /// `OFPBAC_TOO_MANY`
    BadActionTooMany,
    /// `OFPBAC_BAD_QUEUE`
    BadActionBadQueue,
    /// `OFPBAC_BAD_OUT_GROUP`
    BadActionBadOutGroup,
    /// `OFPBAC_MATCH_INCONSISTENT`
    BadActionMatchInconsistent,
    /// `OFPBAC_UNSUPPORTED_ORDER`
    BadActionUnsupportedOrder,
    /// `OFPBAC_BAD_TAG`
    BadActionBadTag,
    /// `OFPBAC_BAD_SET_TYPE`
    BadActionBadSetType,
    /// `OFPBAC_BAD_SET_LEN`
    BadActionBadSetLen,
    /// `OFPBAC_BAD_SET_ARGUMENT`
    BadActionBadSetArgument,
    /// `OFPBIC_UNKNOWN_INST`
    BadInstructionUnknownInst,
    /// `OFPBIC_UNSUP_INST`
    BadInstructionUnsupInst,
    /// `OFPBIC_BAD_TABLE_ID`
    BadInstructionBadTableId,
    /// `OFPBIC_UNSUP_METADATA`
    BadInstructionUnsupMetadata,
    /// `OFPBIC_UNSUP_METADATA_MASK`
    BadInstructionUnsupMetadataMask,
    /// `OFPBIC_BAD_EXPERIMENTER`
    BadInstructionBadExperimenter,
    /// `OFPBIC_BAD_EXP_TYPE`
    BadInstructionBadExpType,
    /// `OFPBIC_BAD_LEN`
    BadInstructionBadLen,
    /// `OFPBIC_EPERM`
    BadInstructionEperm,
    /// `OFPBMC_BAD_TYPE`
    BadMatchBadType,
    /// `OFPBMC_BAD_LEN`
    BadMatchBadLen,
    /// `OFPBMC_BAD_TAG`
    BadMatchBadTag,
    /// `OFPBMC_BAD_DL_ADDR_MASK`
    BadMatchBadDlAddrMask,
    /// `OFPBMC_BAD_NW_ADDR_MASK`
    BadMatchBadNwAddrMask,
    /// `OFPBMC_BAD_WILDCARDS`
    BadMatchBadWildcards,
    /// `OFPBMC_BAD_FIELD`
    BadMatchBadField,
    /// `OFPBMC_BAD_VALUE`
    BadMatchBadValue,
    /// `OFPBMC_BAD_MASK`
    BadMatchBadMask,
    /// `OFPBMC_BAD_PREREQ`
    BadMatchBadPrereq,
    /// `OFPBMC_DUP_FIELD`
    BadMatchDupField,
    /// `OFPBMC_EPERM`
    BadMatchEperm,
    /// `OFPFMFC_UNKNOWN`
    FlowModFailedUnknown,
    /// `OFPFMFC_TABLE_FULL`
    FlowModFailedTableFull,
    /// `OFPFMFC_BAD_TABLE_ID`
    FlowModFailedBadTableId,
    /// `OFPFMFC_OVERLAP`
    FlowModFailedOverlap,
    /// `OFPFMFC_EPERM`
    FlowModFailedEperm,
    /// `OFPFMFC_BAD_TIMEOUT`
    FlowModFailedBadTimeout,
    /// `OFPFMFC_BAD_COMMAND`
    FlowModFailedBadCommand,
    /// `OFPFMFC_BAD_FLAGS`
    FlowModFailedBadFlags,
    /// `OFPFMFC_BAD_EMERG_TIMEOUT`, 1.0 only
    FlowModFailedBadEmergTimeout,
    /// `OFPFMFC_UNSUPPORTED`, 1.0 only
    FlowModFailedUnsupported,
    /// `OFPGMFC_GROUP_EXISTS`
    GroupModFailedGroupExists,
    /// `OFPGMFC_INVALID_GROUP`
    GroupModFailedInvalidGroup,
    /// `OFPGMFC_WEIGHT_UNSUPPORTED`
    GroupModFailedWeightUnsupported,
    /// `OFPGMFC_OUT_OF_GROUPS`
    GroupModFailedOutOfGroups,
    /// `OFPGMFC_OUT_OF_BUCKETS`
    GroupModFailedOutOfBuckets,
    /// `OFPGMFC_CHAINING_UNSUPPORTED`
    GroupModFailedChainingUnsupported,
    /// `OFPGMFC_WATCH_UNSUPPORTED`
    GroupModFailedWatchUnsupported,
    /// `OFPGMFC_LOOP`
    GroupModFailedLoop,
    /// `OFPGMFC_UNKNOWN_GROUP`
    GroupModFailedUnknownGroup,
    /// `OFPGMFC_CHAINED_GROUP`
    GroupModFailedChainedGroup,
    /// `OFPGMFC_BAD_TYPE`
    GroupModFailedBadType,
    /// `OFPGMFC_BAD_COMMAND`
    GroupModFailedBadCommand,
    /// `OFPGMFC_BAD_BUCKET`
    GroupModFailedBadBucket,
    /// `OFPGMFC_BAD_WATCH`
    GroupModFailedBadWatch,
    /// `OFPGMFC_EPERM`
    GroupModFailedEperm,
    /// `OFPPMFC_BAD_PORT`
    PortModFailedBadPort,
    /// `OFPPMFC_BAD_HW_ADDR`
    PortModFailedBadHwAddr,
    /// `OFPPMFC_BAD_CONFIG`
    PortModFailedBadConfig,
    /// `OFPPMFC_BAD_ADVERTISE`
    PortModFailedBadAdvertise,
    /// `OFPPMFC_EPERM`
    PortModFailedEperm,
    /// `OFPTMFC_BAD_TABLE`
    TableModFailedBadTable,
    /// `OFPTMFC_BAD_CONFIG`
    TableModFailedBadConfig,
    /// `OFPTMFC_EPERM`
    TableModFailedEperm,
    /// `OFPQOFC_BAD_PORT`
    QueueOpFailedBadPort,
    /// `OFPQOFC_BAD_QUEUE`
    QueueOpFailedBadQueue,
    /// `OFPQOFC_EPERM`
    QueueOpFailedEperm,
    /// `OFPSCFC_BAD_FLAGS`
    SwitchConfigFailedBadFlags,
    /// `OFPSCFC_BAD_LEN`
    SwitchConfigFailedBadLen,
    /// `OFPSCFC_EPERM`
    SwitchConfigFailedEperm,
    /// `OFPRRFC_STALE`
    RoleRequestFailedStale,
    /// `OFPRRFC_UNSUP`
    RoleRequestFailedUnsup,
    /// `OFPRRFC_BAD_ROLE`
    RoleRequestFailedBadRole,
    /// `OFPMMFC_UNKNOWN`
    MeterModFailedUnknown,
    /// `OFPMMFC_METER_EXISTS`
    MeterModFailedMeterExists,
    /// `OFPMMFC_INVALID_METER`
    MeterModFailedInvalidMeter,
    /// `OFPMMFC_UNKNOWN_METER`
    MeterModFailedUnknownMeter,
    /// `OFPMMFC_BAD_COMMAND`
    MeterModFailedBadCommand,
    /// `OFPMMFC_BAD_FLAGS`
    MeterModFailedBadFlags,
    /// `OFPMMFC_BAD_RATE`
    MeterModFailedBadRate,
    /// `OFPMMFC_BAD_BURST`
    MeterModFailedBadBurst,
    /// `OFPMMFC_BAD_BAND`
    MeterModFailedBadBand,
    /// `OFPMMFC_BAD_BAND_VALUE`
    MeterModFailedBadBandValue,
    /// `OFPMMFC_OUT_OF_METERS`
    MeterModFailedOutOfMeters,
    /// `OFPMMFC_OUT_OF_BANDS`
    MeterModFailedOutOfBands,
    /// `OFPTFFC_BAD_TABLE`
    TableFeaturesFailedBadTable,
    /// `OFPTFFC_BAD_METADATA`
    TableFeaturesFailedBadMetadata,
    /// `OFPTFFC_BAD_TYPE`
    TableFeaturesFailedBadType,
    /// `OFPTFFC_BAD_LEN`
    TableFeaturesFailedBadLen,
    /// `OFPTFFC_BAD_ARGUMENT`
    TableFeaturesFailedBadArgument,
    /// `OFPTFFC_EPERM`
    TableFeaturesFailedEperm,
    /// `OFPET_EXPERIMENTER`, 1.3 only: a type that an experimenter defines.
    Experimenter {
        /// The experimenter's number of the error.
        exp_type: u16,
        /// The experimenter.
        experimenter: u32,
    },
    /// Numbers that the version does not define.
    Unknown {
        /// The type, as on the wire.
        kind: u16,
        /// The code, as on the wire.
        code: u16,
    },
}

/// The type of an experimenter's errors, 1.3 only.
pub(crate) const EXPERIMENTER: u16 = 0xffff;

/// Type and code on the wire.
type Numbers = (u16, u16);

/// Each error with its name in the specification, and its type and code in 1.0 and 1.3.
#[rustfmt::skip]
const TABLE: &[(ErrorCode, &str, Option<Numbers>, Option<Numbers>)] = &[
    (ErrorCode::HelloFailedIncompatible, "OFPHFC_INCOMPATIBLE", Some((0, 0)), Some((0, 0))),
    (ErrorCode::HelloFailedEperm, "OFPHFC_EPERM", Some((0, 1)), Some((0, 1))),
    (ErrorCode::BadRequestBadVersion, "OFPBRC_BAD_VERSION", Some((1, 0)), Some((1, 0))),
    (ErrorCode::BadRequestBadType, "OFPBRC_BAD_TYPE", Some((1, 1)), Some((1, 1))),
    (ErrorCode::BadRequestBadMultipart, "OFPBRC_BAD_MULTIPART", Some((1, 2)), Some((1, 2))),
    (ErrorCode::BadRequestBadExperimenter, "OFPBRC_BAD_EXPERIMENTER", Some((1, 3)), Some((1, 3))),
    (ErrorCode::BadRequestBadExpType, "OFPBRC_BAD_EXP_TYPE", Some((1, 4)), Some((1, 4))),
    (ErrorCode::BadRequestEperm, "OFPBRC_EPERM", Some((1, 5)), Some((1, 5))),
    (ErrorCode::BadRequestBadLen, "OFPBRC_BAD_LEN", Some((1, 6)), Some((1, 6))),
    (ErrorCode::BadRequestBufferEmpty, "OFPBRC_BUFFER_EMPTY", Some((1, 7)), Some((1, 7))),
    (ErrorCode::BadRequestBufferUnknown, "OFPBRC_BUFFER_UNKNOWN", Some((1, 8)), Some((1, 8))),
    (ErrorCode::BadRequestBadTableId, "OFPBRC_BAD_TABLE_ID", None, Some((1, 9))),
    (ErrorCode::BadRequestIsSlave, "OFPBRC_IS_SLAVE", None, Some((1, 10))),
    (ErrorCode::BadRequestBadPort, "OFPBRC_BAD_PORT", None, Some((1, 11))),
    (ErrorCode::BadRequestBadPacket, "OFPBRC_BAD_PACKET", None, Some((1, 12))),
    (ErrorCode::BadRequestMultipartBufferOverflow, "OFPBRC_MULTIPART_BUFFER_OVERFLOW", None, Some((1, 13))),
    (ErrorCode::BadActionBadType, "OFPBAC_BAD_TYPE", Some((2, 0)), Some((2, 0))),
    (ErrorCode::BadActionBadLen, "OFPBAC_BAD_LEN", Some((2, 1)), Some((2, 1))),
    (ErrorCode::BadActionBadExperimenter, "OFPBAC_BAD_EXPERIMENTER", Some((2, 2)), Some((2, 2))),
    (ErrorCode::BadActionBadExpType, "OFPBAC_BAD_EXP_TYPE", Some((2, 3)), Some((2, 3))),
    (ErrorCode::BadActionBadOutPort, "OFPBAC_BAD_OUT_PORT", Some((2, 4)), Some((2, 4))),
    (ErrorCode::BadActionBadArgument, "OFPBAC_BAD_ARGUMENT", Some((2, 5)), Some((2, 5))),
    (ErrorCode::BadActionEperm, "OFPBAC_EPERM", Some((2, 6)), Some((2, 6))),
    (ErrorCode::BadActionTooMany, "OFPBAC_TOO_MANY", Some((2, 7)), Some((2, 7))),
    (ErrorCode::BadActionBadQueue, "OFPBAC_BAD_QUEUE", Some((2, 8)), Some((2, 8))),
    (ErrorCode::BadActionBadOutGroup, "OFPBAC_BAD_OUT_GROUP", None, Some((2, 9))),
    (ErrorCode::BadActionMatchInconsistent, "OFPBAC_MATCH_INCONSISTENT", None, Some((2, 10))),
    (ErrorCode::BadActionUnsupportedOrder, "OFPBAC_UNSUPPORTED_ORDER", None, Some((2, 11))),
    (ErrorCode::BadActionBadTag, "OFPBAC_BAD_TAG", None, Some((2, 12))),
    (ErrorCode::BadActionBadSetType, "OFPBAC_BAD_SET_TYPE", None, Some((2, 13))),
    (ErrorCode::BadActionBadSetLen, "OFPBAC_BAD_SET_LEN", None, Some((2, 14))),
    (ErrorCode::BadActionBadSetArgument, "OFPBAC_BAD_SET_ARGUMENT", None, Some((2, 15))),
    (ErrorCode::BadInstructionUnknownInst, "OFPBIC_UNKNOWN_INST", None, Some((3, 0))),
    (ErrorCode::BadInstructionUnsupInst, "OFPBIC_UNSUP_INST", None, Some((3, 1))),
    (ErrorCode::BadInstructionBadTableId, "OFPBIC_BAD_TABLE_ID", None, Some((3, 2))),
    (ErrorCode::BadInstructionUnsupMetadata, "OFPBIC_UNSUP_METADATA", None, Some((3, 3))),
    (ErrorCode::BadInstructionUnsupMetadataMask, "OFPBIC_UNSUP_METADATA_MASK", None, Some((3, 4))),
    (ErrorCode::BadInstructionBadExperimenter, "OFPBIC_BAD_EXPERIMENTER", None, Some((3, 5))),
    (ErrorCode::BadInstructionBadExpType, "OFPBIC_BAD_EXP_TYPE", None, Some((3, 6))),
    (ErrorCode::BadInstructionBadLen, "OFPBIC_BAD_LEN", None, Some((3, 7))),
    (ErrorCode::BadInstructionEperm, "OFPBIC_EPERM", None, Some((3, 8))),
    (ErrorCode::BadMatchBadType, "OFPBMC_BAD_TYPE", None, Some((4, 0))),
    (ErrorCode::BadMatchBadLen, "OFPBMC_BAD_LEN", None, Some((4, 1))),
    (ErrorCode::BadMatchBadTag, "OFPBMC_BAD_TAG", None, Some((4, 2))),
    (ErrorCode::BadMatchBadDlAddrMask, "OFPBMC_BAD_DL_ADDR_MASK", None, Some((4, 3))),
    (ErrorCode::BadMatchBadNwAddrMask, "OFPBMC_BAD_NW_ADDR_MASK", None, Some((4, 4))),
    (ErrorCode::BadMatchBadWildcards, "OFPBMC_BAD_WILDCARDS", None, Some((4, 5))),
    (ErrorCode::BadMatchBadField, "OFPBMC_BAD_FIELD", None, Some((4, 6))),
    (ErrorCode::BadMatchBadValue, "OFPBMC_BAD_VALUE", None, Some((4, 7))),
    (ErrorCode::BadMatchBadMask, "OFPBMC_BAD_MASK", None, Some((4, 8))),
    (ErrorCode::BadMatchBadPrereq, "OFPBMC_BAD_PREREQ", None, Some((4, 9))),
    (ErrorCode::BadMatchDupField, "OFPBMC_DUP_FIELD", None, Some((4, 10))),
    (ErrorCode::BadMatchEperm, "OFPBMC_EPERM", None, Some((4, 11))),
    (ErrorCode::FlowModFailedUnknown, "OFPFMFC_UNKNOWN", None, Some((5, 0))),
    (ErrorCode::FlowModFailedTableFull, "OFPFMFC_TABLE_FULL", Some((3, 0)), Some((5, 1))),
    (ErrorCode::FlowModFailedBadTableId, "OFPFMFC_BAD_TABLE_ID", None, Some((5, 2))),
    (ErrorCode::FlowModFailedOverlap, "OFPFMFC_OVERLAP", Some((3, 1)), Some((5, 3))),
    (ErrorCode::FlowModFailedEperm, "OFPFMFC_EPERM", Some((3, 2)), Some((5, 4))),
    (ErrorCode::FlowModFailedBadTimeout, "OFPFMFC_BAD_TIMEOUT", None, Some((5, 5))),
    (ErrorCode::FlowModFailedBadCommand, "OFPFMFC_BAD_COMMAND", Some((3, 4)), Some((5, 6))),
    (ErrorCode::FlowModFailedBadFlags, "OFPFMFC_BAD_FLAGS", None, Some((5, 7))),
    (ErrorCode::FlowModFailedBadEmergTimeout, "OFPFMFC_BAD_EMERG_TIMEOUT", Some((3, 3)), None),
    (ErrorCode::FlowModFailedUnsupported, "OFPFMFC_UNSUPPORTED", Some((3, 5)), None),
    (ErrorCode::GroupModFailedGroupExists, "OFPGMFC_GROUP_EXISTS", None, Some((6, 0))),
    (ErrorCode::GroupModFailedInvalidGroup, "OFPGMFC_INVALID_GROUP", None, Some((6, 1))),
    (ErrorCode::GroupModFailedWeightUnsupported, "OFPGMFC_WEIGHT_UNSUPPORTED", None, Some((6, 2))),
    (ErrorCode::GroupModFailedOutOfGroups, "OFPGMFC_OUT_OF_GROUPS", None, Some((6, 3))),
    (ErrorCode::GroupModFailedOutOfBuckets, "OFPGMFC_OUT_OF_BUCKETS", None, Some((6, 4))),
    (ErrorCode::GroupModFailedChainingUnsupported, "OFPGMFC_CHAINING_UNSUPPORTED", None, Some((6, 5))),
    (ErrorCode::GroupModFailedWatchUnsupported, "OFPGMFC_WATCH_UNSUPPORTED", None, Some((6, 6))),
    (ErrorCode::GroupModFailedLoop, "OFPGMFC_LOOP", None, Some((6, 7))),
    (ErrorCode::GroupModFailedUnknownGroup, "OFPGMFC_UNKNOWN_GROUP", None, Some((6, 8))),
    (ErrorCode::GroupModFailedChainedGroup, "OFPGMFC_CHAINED_GROUP", None, Some((6, 9))),
    (ErrorCode::GroupModFailedBadType, "OFPGMFC_BAD_TYPE", None, Some((6, 10))),
    (ErrorCode::GroupModFailedBadCommand, "OFPGMFC_BAD_COMMAND", None, Some((6, 11))),
    (ErrorCode::GroupModFailedBadBucket, "OFPGMFC_BAD_BUCKET", None, Some((6, 12))),
    (ErrorCode::GroupModFailedBadWatch, "OFPGMFC_BAD_WATCH", None, Some((6, 13))),
    (ErrorCode::GroupModFailedEperm, "OFPGMFC_EPERM", None, Some((6, 14))),
    (ErrorCode::PortModFailedBadPort, "OFPPMFC_BAD_PORT", Some((4, 0)), Some((7, 0))),
    (ErrorCode::PortModFailedBadHwAddr, "OFPPMFC_BAD_HW_ADDR", Some((4, 1)), Some((7, 1))),
    (ErrorCode::PortModFailedBadConfig, "OFPPMFC_BAD_CONFIG", None, Some((7, 2))),
    (ErrorCode::PortModFailedBadAdvertise, "OFPPMFC_BAD_ADVERTISE", None, Some((7, 3))),
    (ErrorCode::PortModFailedEperm, "OFPPMFC_EPERM", None, Some((7, 4))),
    (ErrorCode::TableModFailedBadTable, "OFPTMFC_BAD_TABLE", None, Some((8, 0))),
    (ErrorCode::TableModFailedBadConfig, "OFPTMFC_BAD_CONFIG", None, Some((8, 1))),
    (ErrorCode::TableModFailedEperm, "OFPTMFC_EPERM", None, Some((8, 2))),
    (ErrorCode::QueueOpFailedBadPort, "OFPQOFC_BAD_PORT", Some((5, 0)), Some((9, 0))),
    (ErrorCode::QueueOpFailedBadQueue, "OFPQOFC_BAD_QUEUE", Some((5, 1)), Some((9, 1))),
    (ErrorCode::QueueOpFailedEperm, "OFPQOFC_EPERM", Some((5, 2)), Some((9, 2))),
    (ErrorCode::SwitchConfigFailedBadFlags, "OFPSCFC_BAD_FLAGS", None, Some((10, 0))),
    (ErrorCode::SwitchConfigFailedBadLen, "OFPSCFC_BAD_LEN", None, Some((10, 1))),
    (ErrorCode::SwitchConfigFailedEperm, "OFPSCFC_EPERM", None, Some((10, 2))),
    (ErrorCode::RoleRequestFailedStale, "OFPRRFC_STALE", None, Some((11, 0))),
    (ErrorCode::RoleRequestFailedUnsup, "OFPRRFC_UNSUP", None, Some((11, 1))),
    (ErrorCode::RoleRequestFailedBadRole, "OFPRRFC_BAD_ROLE", None, Some((11, 2))),
    (ErrorCode::MeterModFailedUnknown, "OFPMMFC_UNKNOWN", None, Some((12, 0))),
    (ErrorCode::MeterModFailedMeterExists, "OFPMMFC_METER_EXISTS", None, Some((12, 1))),
    (ErrorCode::MeterModFailedInvalidMeter, "OFPMMFC_INVALID_METER", None, Some((12, 2))),
    (ErrorCode::MeterModFailedUnknownMeter, "OFPMMFC_UNKNOWN_METER", None, Some((12, 3))),
    (ErrorCode::MeterModFailedBadCommand, "OFPMMFC_BAD_COMMAND", None, Some((12, 4))),
    (ErrorCode::MeterModFailedBadFlags, "OFPMMFC_BAD_FLAGS", None, Some((12, 5))),
    (ErrorCode::MeterModFailedBadRate, "OFPMMFC_BAD_RATE", None, Some((12, 6))),
    (ErrorCode::MeterModFailedBadBurst, "OFPMMFC_BAD_BURST", None, Some((12, 7))),
    (ErrorCode::MeterModFailedBadBand, "OFPMMFC_BAD_BAND", None, Some((12, 8))),
    (ErrorCode::MeterModFailedBadBandValue, "OFPMMFC_BAD_BAND_VALUE", None, Some((12, 9))),
    (ErrorCode::MeterModFailedOutOfMeters, "OFPMMFC_OUT_OF_METERS", None, Some((12, 10))),
    (ErrorCode::MeterModFailedOutOfBands, "OFPMMFC_OUT_OF_BANDS", None, Some((12, 11))),
    (ErrorCode::TableFeaturesFailedBadTable, "OFPTFFC_BAD_TABLE", None, Some((13, 0))),
    (ErrorCode::TableFeaturesFailedBadMetadata, "OFPTFFC_BAD_METADATA", None, Some((13, 1))),
    (ErrorCode::TableFeaturesFailedBadType, "OFPTFFC_BAD_TYPE", None, Some((13, 2))),
    (ErrorCode::TableFeaturesFailedBadLen, "OFPTFFC_BAD_LEN", None, Some((13, 3))),
    (ErrorCode::TableFeaturesFailedBadArgument, "OFPTFFC_BAD_ARGUMENT", None, Some((13, 4))),
    (ErrorCode::TableFeaturesFailedEperm, "OFPTFFC_EPERM", None, Some((13, 5))),
];

impl ErrorCode {
    /// All named errors.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    /// Type and code in `version`; `None` if it has no such error. For an experimenter's error the code is its `exp_type`.
    pub fn numbers(self, version: Version) -> Option<(u16, u16)> {
        match self {
            Self::Unknown { kind, code } => Some((kind, code)),
            Self::Experimenter { exp_type, .. } => (version == Version::V1_3).then_some((EXPERIMENTER, exp_type)),
            named => TABLE.iter().find(|row| row.0 == named).and_then(|row| numbers_of(row, version)),
        }
    }

    /// The error with this type and code in `version`.
    pub fn from_numbers(version: Version, kind: u16, code: u16) -> Self {
        let row = TABLE.iter().find(|row| numbers_of(row, version) == Some((kind, code)));
        row.map_or(Self::Unknown { kind, code }, |row| row.0)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { kind, code } => write!(f, "unknown error, type {kind}, code {code}"),
            Self::Experimenter { exp_type, experimenter } => write!(f, "error {exp_type} of experimenter {experimenter:#010x}"),
            named => f.write_str(TABLE.iter().find(|row| row.0 == *named).map_or("error", |row| row.1)),
        }
    }
}

fn numbers_of(row: &(ErrorCode, &str, Option<Numbers>, Option<Numbers>), version: Version) -> Option<Numbers> {
    match version {
        Version::V1_0 => row.2,
        Version::V1_3 => row.3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_convert_back() {
        let (mut counts, mut names) = ([0; 2], std::collections::BTreeSet::new());
        for code in ErrorCode::all() {
            for (count, version) in counts.iter_mut().zip(Version::ALL) {
                if let Some((kind, number)) = code.numbers(version) {
                    assert_eq!(ErrorCode::from_numbers(version, kind, number), code);
                    *count += 1;
                }
            }
            names.insert(format!("{code:?}"));
        }
        // 1.0.1 section 5.4.4 has 31 codes, 1.3.5 section 7.4.4 has 111.
        assert_eq!((counts, names.len()), ([31, 111], TABLE.len()));
        assert_eq!(ErrorCode::from_numbers(Version::V1_0, 9, 1), ErrorCode::Unknown { kind: 9, code: 1 });
    }
}
