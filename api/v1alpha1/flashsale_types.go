package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FlashSaleSpec is the sale as the platform team declares it.
//
// +kubebuilder:validation:XValidation:rule="!has(self.endTime) || self.startTime < self.endTime",message="endTime must be after startTime"
type FlashSaleSpec struct {
	// sku is what is sold, in the shop's own terms. Immutable once units are loaded.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	SKU string `json:"sku"`

	// units is how many units are for sale, 1 to 10,000,000. It may grow until the sale is over, and may not shrink once
	// loading has begun.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000000
	Units int32 `json:"units"`

	// startTime is the opening instant, RFC 3339 with an offset. It may move until the sale has opened. A time in the past
	// opens the sale as soon as it is loaded.
	// +required
	StartTime metav1.Time `json:"startTime"`

	// endTime is the end of the sale, RFC 3339 with an offset, exclusive. Holds granted before it may be paid until their
	// holdTTL is over. Without it the sale ends when every unit is sold.
	// +optional
	EndTime *metav1.Time `json:"endTime,omitempty"`

	// holdTTL is how long a reservation unlocks checkout, 1s to 24h; default 10m. A change is for new holds only.
	// +optional
	// +kubebuilder:default="10m"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('24h')",message="holdTTL must be between 1s and 24h"
	HoldTTL metav1.Duration `json:"holdTTL,omitempty"`

	// maxPerBuyer is how many units one buyer may hold and own together, 1 to 1,000; default 1.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	MaxPerBuyer int32 `json:"maxPerBuyer,omitempty"`

	// database names the MySQL schema that holds the units.
	// +required
	Database DatabaseSpec `json:"database"`

	// reserver shapes the reservation pods.
	// +optional
	// +kubebuilder:default={}
	Reserver ReserverSpec `json:"reserver,omitempty"`

	// sweep shapes the sweeper, which takes expired holds back.
	// +optional
	// +kubebuilder:default={}
	Sweep SweepSpec `json:"sweep,omitempty"`

	// payments says what happens to payments that come late.
	// +optional
	// +kubebuilder:default={}
	Payments PaymentsSpec `json:"payments,omitempty"`

	// webhook is told of what happens in the sale, if given.
	// +optional
	Webhook *WebhookSpec `json:"webhook,omitempty"`

	// suspend closes the gate while true: nobody gets a new hold, live holds can be paid. It is obeyed at any time.
	// +optional
	Suspend bool `json:"suspend,omitempty"`

	// deletionPolicy says what happens to the sale's rows when the object is deleted. Retain (the default) keeps them, and
	// waits 30 seconds at most for a database that is gone; Delete removes them, the ledger included.
	// +optional
	// +kubebuilder:default=Retain
	DeletionPolicy DeletionPolicy `json:"deletionPolicy,omitempty"`
}

// DeletionPolicy is Retain or Delete.
// +kubebuilder:validation:Enum=Retain;Delete
type DeletionPolicy string

// The deletion policies.
const (
	DeletionRetain DeletionPolicy = "Retain"
	DeletionDelete DeletionPolicy = "Delete"
)

// DatabaseSpec names the MySQL schema that holds the units.
type DatabaseSpec struct {
	// secretRef names a Secret of the same namespace, with either the key dsn (user:password@tcp(host:port)/database) or
	// the keys host, port, username, password and database, and optionally ca.crt.
	// +required
	SecretRef SecretReference `json:"secretRef"`
}

// SecretReference names a Secret of the same namespace.
type SecretReference struct {
	// name of the Secret.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
}

// ReserverSpec shapes the reservation pods.
type ReserverSpec struct {
	// replicas is how many reservation pods serve the sale, 1 to 100; default 2.
	// +optional
	// +kubebuilder:default=2
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	Replicas int32 `json:"replicas,omitempty"`

	// warmup is how long before the start the pods are made, so that they are ready in time, 0s to 24h;
	// default 5m.
	// +optional
	// +kubebuilder:default="5m"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('24h')",message="warmup must be between 0s and 24h"
	Warmup metav1.Duration `json:"warmup,omitempty"`

	// image of the pods. Leave it empty for the operator's own image, so that both are of one version.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`

	// resources of each reservation pod. Default: requests of 100m CPU and 64Mi, a limit of 512Mi.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.claims)",message="claims are not supported"
	Resources *corev1.ResourceRequirements `json:"resources,omitempty"`
}

// SweepSpec shapes the sweeper.
type SweepSpec struct {
	// interval between two looks for expired holds, 100ms to 1s (the default): a hold ends at most 2 s after
	// its time.
	// +optional
	// +kubebuilder:default="1s"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('100ms') && duration(self) <= duration('1s')",message="interval must be between 100ms and 1s"
	Interval metav1.Duration `json:"interval,omitempty"`

	// batchSize is how many holds one transaction takes back, 1 to 5,000; default 4,000.
	// +optional
	// +kubebuilder:default=4000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=5000
	BatchSize int32 `json:"batchSize,omitempty"`
}

// PaymentsSpec says what happens to payments that come late.
type PaymentsSpec struct {
	// late says what a payment gets that arrives when its hold has lapsed: with Reclaim (the default) units that are still
	// free, under the same reservation, else it is due to be refunded; with Refuse it is always due to be refunded.
	// +optional
	// +kubebuilder:default=Reclaim
	Late LatePolicy `json:"late,omitempty"`
}

// LatePolicy is Reclaim or Refuse.
// +kubebuilder:validation:Enum=Reclaim;Refuse
type LatePolicy string

// The policies for late payments.
const (
	LateReclaim LatePolicy = "Reclaim"
	LateRefuse  LatePolicy = "Refuse"
)

// WebhookSpec names who is told of what happens in the sale: CloudEvents by HTTP POST, at least once each.
type WebhookSpec struct {
	// url that the events are posted to, http or https.
	// +required
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHost() != ''",message="url must be an http or https URL"
	URL string `json:"url"`

	// secretRef names a Secret of the same namespace whose key secret signs the events, as Standard Webhooks say:
	// whsec_ and the key's 24 to 64 bytes in base64.
	// +required
	SecretRef SecretReference `json:"secretRef"`
}

// Phase is where a sale stands, for people; conditions are for programs.
// +kubebuilder:validation:Enum=Pending;Loading;Scheduled;Warming;Live;Suspended;Draining;Closed;Failed
type Phase string

// The phases, in their order.
const (
	PhasePending   Phase = "Pending"   // seen; the database is not fit or not checked yet
	PhaseLoading   Phase = "Loading"   // unit rows are being inserted
	PhaseScheduled Phase = "Scheduled" // loaded; nothing runs
	PhaseWarming   Phase = "Warming"   // pods start, before the start
	PhaseLive      Phase = "Live"      // within the window
	PhaseSuspended Phase = "Suspended" // warming or live, with the gate closed
	PhaseDraining  Phase = "Draining"  // no new holds; live ones may be paid
	PhaseClosed    Phase = "Closed"    // over; the result is in the status for ever
	PhaseFailed    Phase = "Failed"    // needs a person
)

// FlashSaleStatus is the sale as the controller sees it.
type FlashSaleStatus struct {
	// observedGeneration is the metadata.generation that the status speaks of; -1 until the object was seen first.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// phase is where the sale stands.
	// +optional
	Phase Phase `json:"phase,omitempty"`

	// conditions of the sale.
	// +optional
	// +listType=map
	// +listMapKey=type
	// +kubebuilder:validation:MaxItems=16
	Conditions []metav1.Condition `json:"conditions,omitempty"`

	// inventory counts units, at most 2 s old while the sale is live.
	// +optional
	Inventory *InventoryStatus `json:"inventory,omitempty"`

	// openedAt is when the sale opened, by the database's clock.
	// +optional
	OpenedAt *metav1.Time `json:"openedAt,omitempty"`

	// soldOutAt is when the last unit was sold, by the database's clock.
	// +optional
	SoldOutAt *metav1.Time `json:"soldOutAt,omitempty"`

	// closedAt is when the sale closed, by the database's clock.
	// +optional
	ClosedAt *metav1.Time `json:"closedAt,omitempty"`

	// endpoint is the URL of the reservation API within the cluster, while pods run.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Endpoint string `json:"endpoint,omitempty"`

	// reservers counts reservation pods.
	// +optional
	Reservers *ReserversStatus `json:"reservers,omitempty"`

	// audit is the result of the final audit.
	// +optional
	Audit *AuditStatus `json:"audit,omitempty"`

	// message says in a sentence where the sale stands.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message,omitempty"`
}

// InventoryStatus counts units.
type InventoryStatus struct {
	// loaded is how many units have their row.
	Loaded int64 `json:"loaded"`
	// available units can be reserved.
	Available int64 `json:"available"`
	// held units are reserved and not paid.
	Held int64 `json:"held"`
	// sold units are paid.
	Sold int64 `json:"sold"`
}

// ReserversStatus counts reservation pods.
type ReserversStatus struct {
	// ready pods answer requests.
	Ready int32 `json:"ready"`
	// desired pods are wanted.
	Desired int32 `json:"desired"`
	// summary is "ready/desired", for kubectl.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	Summary string `json:"summary,omitempty"`
}

// AuditStatus is the result of an audit.
type AuditStatus struct {
	// passed says that every invariant holds.
	Passed bool `json:"passed"`
	// takenAt is when the rows were read, by the database's clock.
	TakenAt metav1.Time `json:"takenAt"`
	// failed names the invariants that do not hold.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=1024
	Failed []string `json:"failed,omitempty"`
}

// FlashSale sells a number of units of one SKU, first come first served, from an instant on.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=fs,categories=all
// +kubebuilder:printcolumn:name="SKU",type=string,JSONPath=`.spec.sku`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Units",type=integer,JSONPath=`.spec.units`
// +kubebuilder:printcolumn:name="Available",type=integer,JSONPath=`.status.inventory.available`
// +kubebuilder:printcolumn:name="Held",type=integer,JSONPath=`.status.inventory.held`
// +kubebuilder:printcolumn:name="Sold",type=integer,JSONPath=`.status.inventory.sold`
// +kubebuilder:printcolumn:name="Starts",type=string,JSONPath=`.spec.startTime`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Ends",type=string,priority=1,JSONPath=`.spec.endTime`
// +kubebuilder:printcolumn:name="Reservers",type=string,priority=1,JSONPath=`.status.reservers.summary`
// +kubebuilder:printcolumn:name="Endpoint",type=string,priority=1,JSONPath=`.status.endpoint`
// +kubebuilder:printcolumn:name="Message",type=string,priority=1,JSONPath=`.status.message`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$') && size(self.metadata.name) <= 50",message="the name must be a DNS label of at most 50 characters that begins with a letter: the reservation Service is named after it"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.inventory) || oldSelf.status.inventory.loaded == 0 || self.spec.sku == oldSelf.spec.sku",message="sku cannot change once units are loaded"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.inventory) || self.spec.units >= oldSelf.spec.units",message="units cannot shrink once loading has begun (status.inventory)"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase != 'Closed' || (self.spec.sku == oldSelf.spec.sku && self.spec.units == oldSelf.spec.units && self.spec.startTime == oldSelf.spec.startTime && has(self.spec.endTime) == has(oldSelf.spec.endTime) && (!has(self.spec.endTime) || self.spec.endTime == oldSelf.spec.endTime))",message="the sale is over: sku, units, startTime and endTime cannot change; make a new FlashSale"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.openedAt) || self.spec.startTime == oldSelf.spec.startTime",message="startTime cannot move once the sale has opened (status.openedAt)"
type FlashSale struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// spec is the sale as declared.
	// +required
	Spec FlashSaleSpec `json:"spec"`

	// status is the sale as seen.
	// +optional
	// +kubebuilder:default={"observedGeneration":-1}
	Status FlashSaleStatus `json:"status,omitempty"`
}

// FlashSaleList is a list of sales.
//
// +kubebuilder:object:root=true
type FlashSaleList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []FlashSale `json:"items"`
}
