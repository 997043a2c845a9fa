package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// FlashSaleSpec is the sale as the platform team declares it.
//
// +kubebuilder:validation:XValidation:rule="!has(self.endTime) || self.startTime < self.endTime",message="endTime must be after startTime"
// +kubebuilder:validation:XValidation:rule="has(self.admission.jwt) || (has(self.admission.trustedProxies) && size(self.admission.trustedProxies) > 0)",message="say who buyers are: set admission.trustedProxies (the addresses of the gateway that sets buyerHeader) or admission.jwt"
type FlashSaleSpec struct {
	// sku is what is sold, in the shop's own terms. Immutable once units are loaded.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	SKU string `json:"sku"`

	// units is how many units are for sale, 1 to 10,000,000. It may grow and shrink until the sale is over. Units that are
	// held or sold are not taken away: a smaller number is reached as far as holds lapse, and the condition InventoryLoaded
	// says so meanwhile.
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

	// admission says who buyers are, and who of them is let through to the claim. At least one of trustedProxies and jwt
	// must be set.
	// +required
	// +kubebuilder:default={}
	Admission AdmissionSpec `json:"admission"`

	// payments says what happens to payments that come late.
	// +optional
	// +kubebuilder:default={}
	Payments PaymentsSpec `json:"payments,omitempty"`

	// closing says what happens at endTime, or when the object is deleted, to holds that are not paid yet. With Drain (the
	// default) they may be paid until their holdTTL is over; with Release they lapse at once, and a hold granted shortly
	// before endTime is granted until then only.
	// +optional
	// +kubebuilder:default=Drain
	Closing ClosingPolicy `json:"closing,omitempty"`

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

// ClosingPolicy is Drain or Release.
// +kubebuilder:validation:Enum=Drain;Release
type ClosingPolicy string

// The closing policies.
const (
	ClosingDrain   ClosingPolicy = "Drain"
	ClosingRelease ClosingPolicy = "Release"
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
//
// +kubebuilder:validation:XValidation:rule="!has(self.autoscaling) || (self.autoscaling.minReplicas <= self.replicas && self.replicas <= self.autoscaling.maxReplicas)",message="replicas, the size at the start, must lie between autoscaling.minReplicas and autoscaling.maxReplicas"
// +kubebuilder:validation:XValidation:rule="!has(self.autoscaling) || !has(self.resources) || (has(self.resources.requests) && 'cpu' in self.resources.requests)",message="autoscaling needs resources.requests.cpu: utilization is measured against it"
// +kubebuilder:validation:XValidation:rule="!has(self.ingress) || !has(self.httpRoute)",message="ingress and httpRoute exclude each other"
type ReserverSpec struct {
	// replicas is how many reservation pods serve the sale, 1 to 100; default 2. With autoscaling it is their number from
	// the warm-up to a minute after the start, and the autoscaler's affair from then on.
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

	// autoscaling lets a HorizontalPodAutoscaler set the number of pods.
	// +optional
	Autoscaling *AutoscalingSpec `json:"autoscaling,omitempty"`

	// image of the pods. Leave it empty for the operator's own image, so that both are of one version.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Image string `json:"image,omitempty"`

	// resources of each reservation pod. Default: requests of 100m CPU and 64Mi, a limit of 512Mi.
	// +optional
	// +kubebuilder:validation:XValidation:rule="!has(self.claims)",message="claims are not supported"
	Resources *corev1.ResourceRequirements `json:"resources,omitempty"`

	// pod overrides how reservation pods and the sweeper are labelled and scheduled.
	// +optional
	// +kubebuilder:default={}
	Pod PodSpec `json:"pod,omitempty"`

	// service shapes the Service in front of the reservation pods.
	// +optional
	// +kubebuilder:default={}
	Service ServiceSpec `json:"service,omitempty"`

	// ingress asks for an Ingress that leads to the Service.
	// +optional
	Ingress *IngressSpec `json:"ingress,omitempty"`

	// httpRoute asks for a Gateway API HTTPRoute that leads to the Service. The cluster must have the Gateway API.
	// +optional
	HTTPRoute *HTTPRouteSpec `json:"httpRoute,omitempty"`
}

// AutoscalingSpec bounds the number of reservation pods and says by what load they are added.
//
// +kubebuilder:validation:XValidation:rule="self.minReplicas <= self.maxReplicas",message="minReplicas must not be above maxReplicas"
type AutoscalingSpec struct {
	// minReplicas is the least number of pods from a minute after the start on, 1 to 100; default 1.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	MinReplicas int32 `json:"minReplicas,omitempty"`

	// maxReplicas is the greatest number of pods, 1 to 100.
	// +required
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100
	MaxReplicas int32 `json:"maxReplicas"`

	// targetCPUUtilizationPercentage is the average CPU use, in percent of what the pods request, that the autoscaler
	// aims at, 1 to 1,000; default 70.
	// +optional
	// +kubebuilder:default=70
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000
	TargetCPUUtilizationPercentage int32 `json:"targetCPUUtilizationPercentage,omitempty"`
}

// PodSpec overrides how pods are labelled and scheduled. What runs in them, and their security, is the operator's.
type PodSpec struct {
	// labels are added to the pods.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(key, !key.startsWith('app.kubernetes.io/') && !key.startsWith('sales.flashsale.dev/'))",message="labels of app.kubernetes.io/ and sales.flashsale.dev/ are the operator's own"
	Labels map[string]string `json:"labels,omitempty"`

	// annotations are added to the pods.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	// +kubebuilder:validation:XValidation:rule="self.all(key, !key.startsWith('sales.flashsale.dev/'))",message="annotations of sales.flashsale.dev/ are the operator's own"
	Annotations map[string]string `json:"annotations,omitempty"`

	// nodeSelector names labels that a node must have.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`

	// tolerations of taints.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	Tolerations []corev1.Toleration `json:"tolerations,omitempty"`

	// affinity of the pods.
	// +optional
	Affinity *corev1.Affinity `json:"affinity,omitempty"`

	// topologySpread keys are node labels over whose values the pods are spread as evenly as can be, without holding any
	// back; default kubernetes.io/hostname and topology.kubernetes.io/zone.
	// +optional
	// +listType=set
	// +kubebuilder:default={"kubernetes.io/hostname","topology.kubernetes.io/zone"}
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=317
	TopologySpread []string `json:"topologySpread,omitempty"`

	// priorityClassName of the pods.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	PriorityClassName string `json:"priorityClassName,omitempty"`

	// imagePullSecrets name Secrets of the same namespace for the registry of the image.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=8
	ImagePullSecrets []SecretReference `json:"imagePullSecrets,omitempty"`
}

// ServiceSpec shapes the Service in front of the reservation pods.
type ServiceSpec struct {
	// type of the Service: ClusterIP (the default), NodePort or LoadBalancer.
	// +optional
	// +kubebuilder:default=ClusterIP
	// +kubebuilder:validation:Enum=ClusterIP;NodePort;LoadBalancer
	Type corev1.ServiceType `json:"type,omitempty"`

	// annotations of the Service, for load balancers.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	Annotations map[string]string `json:"annotations,omitempty"`
}

// IngressSpec asks for an Ingress: all paths of a host lead to the sale.
type IngressSpec struct {
	// host is the DNS name of the sale.
	// +required
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="!format.dns1123Subdomain().validate(self).hasValue()",message="host must be a DNS name in lower case, such as drops.shop.example"
	Host string `json:"host"`

	// className names the IngressClass; without it the cluster's default is used.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	ClassName string `json:"className,omitempty"`

	// tlsSecretName names the Secret with the host's certificate; without it the Ingress has no TLS of its own.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	TLSSecretName string `json:"tlsSecretName,omitempty"`

	// annotations of the Ingress, for its controller.
	// +optional
	// +kubebuilder:validation:MaxProperties=32
	Annotations map[string]string `json:"annotations,omitempty"`
}

// HTTPRouteSpec asks for an HTTPRoute: all paths of its hostnames lead to the sale.
type HTTPRouteSpec struct {
	// parentRefs name the Gateways that the route joins, 1 to 8.
	// +required
	// +listType=atomic
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=8
	ParentRefs []GatewayReference `json:"parentRefs"`

	// hostnames of the sale; without any, those of the Gateway's listener.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MinLength=1
	// +kubebuilder:validation:items:MaxLength=253
	// +kubebuilder:validation:XValidation:rule="self.all(h, !format.dns1123Subdomain().validate(h.startsWith('*.') ? h.substring(2) : h).hasValue())",message="hostnames must be DNS names in lower case, such as drops.shop.example or *.shop.example"
	Hostnames []string `json:"hostnames,omitempty"`
}

// GatewayReference names a Gateway.
type GatewayReference struct {
	// name of the Gateway.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// namespace of the Gateway; default that of the sale.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`

	// sectionName names one listener of the Gateway.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	SectionName string `json:"sectionName,omitempty"`
}

// AdmissionSpec says who buyers are, and who of them is let through to the claim.
type AdmissionSpec struct {
	// buyerHeader is the HTTP header that names the buyer, set by the shop's own gateway; default X-Buyer-Id. It is
	// believed if it comes from trustedProxies.
	// +optional
	// +kubebuilder:default=X-Buyer-Id
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z][A-Za-z0-9-]*$`
	BuyerHeader string `json:"buyerHeader,omitempty"`

	// trustedProxies are the addresses, as CIDRs, from which buyerHeader and X-Forwarded-For are believed: those of the
	// shop's gateway, 64 at most. 0.0.0.0/0 and ::/0 believe everybody: only where nothing but the gateway reaches the pods.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=64
	// +kubebuilder:validation:XValidation:rule="self.all(c, isCIDR(c))",message="trustedProxies must be CIDRs, such as 10.0.0.0/8 or fd00::/8; a single address is written as 192.0.2.7/32"
	TrustedProxies []string `json:"trustedProxies,omitempty"`

	// jwt takes the buyer from a bearer token that the shop's identity provider signed.
	// +optional
	JWT *JWTSpec `json:"jwt,omitempty"`

	// rateLimits bound how often one buyer, or one address, may ask.
	// +optional
	// +kubebuilder:default={}
	RateLimits RateLimitsSpec `json:"rateLimits,omitempty"`

	// maxInFlight is how many claims one pod lets wait for the database, 1 to 1,000,000; default 20,000. More are told
	// to come back in a moment.
	// +optional
	// +kubebuilder:default=20000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	MaxInFlight int32 `json:"maxInFlight,omitempty"`

	// keyGeneration counts the keys of the sale, 0 to 1,000,000; default 0. Raising it, by whatever number, rotates the
	// checkout's token and the signing key once; those from before stay valid until the next time.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=1000000
	// +kubebuilder:validation:XValidation:rule="self >= oldSelf",message="keyGeneration may only grow: keys do not come back"
	KeyGeneration int64 `json:"keyGeneration,omitempty"`
}

// JWTSpec says which bearer tokens name a buyer.
type JWTSpec struct {
	// issuer that a token must have (its claim iss), 1 to 512 characters.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=512
	Issuer string `json:"issuer"`

	// audience that a token must be for (in its claim aud), 1 to 256 characters.
	// +required
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=256
	Audience string `json:"audience"`

	// jwksURL is where the issuer's public keys are, http or https. Over http, whoever is in between can name buyers: only
	// within the cluster.
	// +required
	// +kubebuilder:validation:MinLength=8
	// +kubebuilder:validation:MaxLength=1024
	// +kubebuilder:validation:XValidation:rule="isURL(self) && url(self).getScheme() in ['http', 'https'] && url(self).getHost() != ''",message="jwksURL must be an http or https URL"
	JWKSURL string `json:"jwksURL"`

	// buyerClaim is the claim that names the buyer, 1 to 64 characters; default sub.
	// +optional
	// +kubebuilder:default=sub
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=64
	BuyerClaim string `json:"buyerClaim,omitempty"`

	// leeway is by how much the issuer's clock may differ, 0s to 5m; default 30s.
	// +optional
	// +kubebuilder:default="30s"
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('0s') && duration(self) <= duration('5m')",message="leeway must be between 0s and 5m"
	Leeway metav1.Duration `json:"leeway,omitempty"`
}

// RateLimitsSpec bounds how often one buyer, or one address, may ask. Each pod counts for itself.
type RateLimitsSpec struct {
	// buyer bounds the requests of one buyer.
	// +optional
	// +kubebuilder:default={}
	Buyer BuyerRateLimit `json:"buyer,omitempty"`

	// address bounds the requests from one address. It is off unless asked for: thousands of shoppers may share the
	// address of a mobile carrier.
	// +optional
	// +kubebuilder:default={}
	Address AddressRateLimit `json:"address,omitempty"`
}

// BuyerRateLimit bounds the requests of one buyer.
type BuyerRateLimit struct {
	// perSecond is how many requests a second are let through for long, 0 to 10,000; default 5. 0 is no limit.
	// +optional
	// +kubebuilder:default=5
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	PerSecond *int32 `json:"perSecond,omitempty"`

	// burst is how many requests are let through at once, 1 to 100,000; default 10.
	// +optional
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	Burst int32 `json:"burst,omitempty"`
}

// AddressRateLimit bounds the requests from one address.
type AddressRateLimit struct {
	// perSecond is how many requests a second are let through for long, 0 to 10,000. 0, the default, is no limit:
	// thousands of shoppers may share the address of a mobile carrier.
	// +optional
	// +kubebuilder:default=0
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	PerSecond int32 `json:"perSecond,omitempty"`

	// burst is how many requests are let through at once, 1 to 100,000; default 100.
	// +optional
	// +kubebuilder:default=100
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	Burst int32 `json:"burst,omitempty"`
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

	// result sums a closed sale up.
	// +optional
	Result *ResultStatus `json:"result,omitempty"`

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

// ResultStatus sums a closed sale up, from its rows.
type ResultStatus struct {
	// sold units are paid.
	Sold int64 `json:"sold"`
	// unsold units were left.
	Unsold int64 `json:"unsold"`
	// refundsDue is how many payments are to be refunded by the shop.
	RefundsDue int64 `json:"refundsDue"`
	// firstGrantAt is when the first reservation was granted, by the database's clock.
	// +optional
	FirstGrantAt *metav1.MicroTime `json:"firstGrantAt,omitempty"`
	// peakClaimsPerSecond is the largest number of reservations that one second saw granted.
	PeakClaimsPerSecond int64 `json:"peakClaimsPerSecond"`
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
