package v1alpha1

// Condition types of a FlashSale. Ready is always present. Reconciling and Stalled are present only while they are True.
const (
	// ConditionReady sums the object up: the sale does, or did, what its spec says. A sale that waits for its start is
	// ready, and so is one that has closed.
	ConditionReady = "Ready"
	// ConditionReconciling is True while the controller works towards the spec and expects to get there by itself.
	ConditionReconciling = "Reconciling"
	// ConditionStalled is True when a person must act; reason and message say what to do.
	ConditionStalled = "Stalled"
	// ConditionDatabaseReachable is True when the database answers and is fit for claims.
	ConditionDatabaseReachable = "DatabaseReachable"
	// ConditionInventoryLoaded is True when every unit has its row.
	ConditionInventoryLoaded = "InventoryLoaded"
	// ConditionReserversAvailable is True while all reservation pods wanted are ready; it is absent while none is wanted.
	ConditionReserversAvailable = "ReserversAvailable"
	// ConditionSweeperHealthy is True while the sweeper runs; it is absent while none is wanted.
	ConditionSweeperHealthy = "SweeperHealthy"
	// ConditionSelling is True while shoppers can get reservations.
	ConditionSelling = "Selling"
)

// Reasons of conditions. Those of DatabaseReachable=False are listed in package inventory; SecretNotFound,
// SecretUnreadable and SecretInvalid join them.
const (
	// ReasonScheduled surfaces when the sale is loaded and waits for its warm-up or start.
	ReasonScheduled = "Scheduled"
	// ReasonWarming surfaces between start - warmup and the start.
	ReasonWarming = "Warming"
	// ReasonLive surfaces within the window.
	ReasonLive = "Live"
	// ReasonSuspended surfaces while spec.suspend closes the gate.
	ReasonSuspended = "Suspended"
	// ReasonDraining surfaces when no new holds are granted and live ones may still be paid.
	ReasonDraining = "Draining"
	// ReasonSoldOut surfaces when the sale closed because every unit was sold.
	ReasonSoldOut = "SoldOut"
	// ReasonEnded surfaces when the sale closed at its end with units left.
	ReasonEnded = "Ended"
	// ReasonMissed surfaces when the end passed before any unit was loaded.
	ReasonMissed = "Missed"
	// ReasonLoading surfaces while unit rows are being inserted.
	ReasonLoading = "Loading"
	// ReasonLoaded surfaces when every unit has its row.
	ReasonLoaded = "Loaded"
	// ReasonPending surfaces before the database has been checked.
	ReasonPending = "Pending"
	// ReasonReachable surfaces when the database answers and is fit for claims.
	ReasonReachable = "Reachable"
	// ReasonSecretNotFound surfaces when spec.database.secretRef names no Secret of the namespace.
	ReasonSecretNotFound = "SecretNotFound"
	// ReasonSecretUnreadable surfaces when the API server does not give the Secret out.
	ReasonSecretUnreadable = "SecretUnreadable"
	// ReasonSecretInvalid surfaces when the Secret lacks a key.
	ReasonSecretInvalid = "SecretInvalid"
	// ReasonAvailable surfaces when the pods wanted are ready.
	ReasonAvailable = "Available"
	// ReasonUnavailable surfaces when pods wanted are not ready.
	ReasonUnavailable = "Unavailable"
	// ReasonImageUnavailable surfaces when the image of the pods cannot be had.
	ReasonImageUnavailable = "ImageUnavailable"
	// ReasonUnschedulable surfaces when no node takes the pods.
	ReasonUnschedulable = "Unschedulable"
	// ReasonQuotaExceeded surfaces when a ResourceQuota of the namespace keeps objects or pods from being made.
	ReasonQuotaExceeded = "QuotaExceeded"
	// ReasonPodsRefused surfaces when the API server refuses the pods otherwise, as an admission policy does.
	ReasonPodsRefused = "PodsRefused"
	// ReasonPodsFailing surfaces when the containers of the pods do not start, or end again and again.
	ReasonPodsFailing = "PodsFailing"
	// ReasonUnitsInUse surfaces when spec.units is below what is held and sold.
	ReasonUnitsInUse = "UnitsInUse"
	// ReasonOperatorNamespace surfaces when the object is in the operator's own namespace.
	ReasonOperatorNamespace = "OperatorNamespace"
	// ReasonClockSkew surfaces when the clocks of the controller and the database differ; the database's counts.
	ReasonClockSkew = "ClockSkew"
	// ReasonThrottled surfaces when the API server asks to be asked less.
	ReasonThrottled = "Throttled"
	// ReasonNoGatewayAPI surfaces when an HTTPRoute is wanted of a cluster without the Gateway API.
	ReasonNoGatewayAPI = "NoGatewayAPI"
	// ReasonAuditFailed surfaces when the final audit found rows that break an invariant.
	ReasonAuditFailed = "AuditFailed"
	// ReasonNameConflict surfaces when an object of another owner has the name of a child.
	ReasonNameConflict = "NameConflict"
	// ReasonKeysInvalid surfaces when the Secret with the sale's keys holds something else.
	ReasonKeysInvalid = "KeysInvalid"
	// ReasonApplyFailed surfaces when the API server refuses a child.
	ReasonApplyFailed = "ApplyFailed"
	// ReasonTablesLost surfaces when the sale's rows are gone from the database although units had been loaded.
	ReasonTablesLost = "TablesLost"
)

// Finalizer keeps a FlashSale until its live holds have ended and, under deletionPolicy Delete, its rows are gone.
const Finalizer = "sales.flashsale.dev/drain"

// AnnotationForceDelete set to "true" gives up what deletion waits for: live holds and the deletion of rows.
const AnnotationForceDelete = "sales.flashsale.dev/force-delete"

// LabelSaleUID holds the UID of the FlashSale that a Deployment, Service or pod belongs to.
const LabelSaleUID = "sales.flashsale.dev/sale-uid"
